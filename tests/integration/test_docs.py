"""README and docs: commands and snippets run at toy sizes, what they show is what is
printed, names exist.
"""

import json
import logging
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import numpy as np
import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from dstrain import GenerateConfig, TrainConfig
from dstrain.cli.main import command_group, main
from dstrain.config import flags
from dstrain.config.options import ModelChoice
from dstrain.pipeline import with_overrides
from dstrain.plugin import ModelFamily, PipelineSpec
from dstrain.registry import load_extensions, load_family
from dstrain_tools.hints import advice
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support import ROOT, everyday
from tests.support.forks import forget_accelerator

PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.ipynb")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INFO = re.compile(
    r"sh|sh exit=\d+|sh no-test \(\w.*\)|python|python file=\S+|(?:csv|toml) file=\S+|text|text output"
)
FAMILIES = ("flux", "flux2", "qwen_image", "sdxl", "wan", "z_image")
NOT_RUN = 7
"""Blocks that may be marked no-test, in all pages together: those that install,
download or run everything.
"""
SMALL: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "train": ("--dataset_repeat", "1"),
    "generate": ("--height", "64", "--width", "64", "--num_inference_steps", "2"),
})  # fmt: skip
"""What is put after a command: of a flag given twice the last counts."""
FEWER_FRAMES = ("--num_frames", "5")
"""The same, where a video that is generated has a length."""
FEWER_BLOCKS = ("--blocks_to_swap", "1")
"""The same, where blocks are swapped: toys have two."""
FEWER_STEPS = ("--max_steps", "2")
"""The same, where a run has thousands of steps."""
SHORTENED = (
    ("dataset_repeat=50", "dataset_repeat=2"),
    ("=512", "=64"),
    ('resolution = "1024"', 'resolution = "64"'),
    ("range(100)", "range(2)"),
)
FOREIGN_FLAGS = frozenset(
    {
        *("--all-cases", "--names", "--record", "--table", "--budget", "--no-index"),
        *("--find-links", "--local-dir", "--dataset", "--include", "--local_dir"),
        *("--repo-type", "--help", "--config_file", "--use_fsdp", "--fsdp_version"),
        *("--fsdp_offload_params", "--fsdp_reshard_after_forward", "--cpu", "--tiny"),
        *("--num_processes", "--nproc_per_node", "--standalone", "--memory"),
        *("--nnodes", "--rdzv_id", "--rdzv_backend", "--rdzv_endpoint"),
        *("--max_restarts", "--num_machines", "--machine_rank", "--main_process_ip"),
        *("--main_process_port", "--job-name", "--nodes", "--ntasks-per-node"),
        *("--gpus-per-node", "--time", "--signal", "--requeue", "--open-mode"),
        *("--dependency", "--init", "--shm-size", "--ipc", "--logdir"),
    }
)


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is that of its fence in the page, `output` the text that
    must be what it prints.
    """

    line: int
    info: str
    body: str
    output: str | None = None


def text_of(page: Path) -> str:
    """Return a page as Markdown: of a notebook its cells, those of code as fenced blocks."""
    if page.suffix != ".ipynb":
        return page.read_text()
    parts = []
    for cell in json.loads(page.read_text())["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source)
    return "\n\n".join(parts) + "\n"


def blocks(page: str) -> Iterator[Block]:
    """Yield a page's fenced blocks in order; a `text output` block becomes part of the
    one before it.
    """
    found = [
        Block(page.count("\n", 0, m.start()) + 1, m[1], m[2])
        for m in FENCE.finditer(page)
    ]
    for block, after in zip(found, [*found[1:], None], strict=False):
        shown = (
            after.body if after is not None and after.info == "text output" else None
        )
        yield Block(block.line, block.info, block.body, shown)


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def every(pages: tuple[Path, ...]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=shown)


def runs(page: Path) -> bool:
    """Whether a page has something to run. Those in Chinese have what the English ones
    have, which tests/integration/test_site.py compares.
    """
    return page.parent.name != "zh" and any(
        re.match(r"(sh|python)(?! no-test)", block.info)
        for block in blocks(text_of(page))
    )


def in_cli(words: list[str]) -> int:
    """Run a dstrain command line at toy sizes and return its exit code."""
    command = "train" if words[0].startswith("-") else words[0]
    is_video = command == "generate" and FEWER_FRAMES[0] in words
    shorter = FEWER_FRAMES if is_video else ()
    if FEWER_BLOCKS[0] in words:
        shorter = (*shorter, *FEWER_BLOCKS)
    steps = dict(pairwise(words)).get(FEWER_STEPS[0], "")
    if len(steps) > 3:
        shorter = (*shorter, *FEWER_STEPS)
    return main([*words, *SMALL.get(command, ()), *shorter])


def in_script(words: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
    return 0


def in_launcher(words: list[str]) -> int:
    """Launch as `accelerate` does, in a process of its own, with what makes a dstrain
    command small.
    """
    launch_command(launch_command_parser().parse_args([*words[1:], *SMALL["train"]]))
    return 0


PROGRAMS: Mapping[str, Callable[[list[str]], int]] = MappingProxyType(
    {"dstrain": in_cli, "python": in_script, "accelerate": in_launcher}
)


def commands(body: str) -> Iterator[list[str]]:
    """Yield the commands of a shell block as words."""
    for line in body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def shortened(source: str) -> str:
    for long, short in SHORTENED:
        source = source.replace(long, short)
    return source


@pytest.fixture(scope="session")
def toy_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models; a page's are written when it is tested, and shared by all
    pages.
    """
    return tmp_path_factory.mktemp("models")


def write_toys(page: str, folder: Path) -> None:
    """Write a toy in the place of each published model that a page names: of the
    variant that its id means.
    """
    named = re.findall(r"[\w.-]+/[\w.-]+(?=:)", page)
    named += re.findall(r"(?<=--model_id )[\w.-]+/[\w.-]+", page)
    for family in (load_family(name) for name in FAMILIES):
        ids = dict.fromkeys(["Qwen/Qwen-Image", *named])
        for model_id in list(ids):
            for pattern in family.model_files.get(model_id, {}).values():
                ids.update(dict.fromkeys(filter(None, [pattern.rpartition(":")[0]])))
        written = []
        for model_id in ids:
            variants = family.variants_of(model_id)
            if variants and not (folder / model_id).exists():
                family.load("toy")(folder / model_id, variants[0])
                written.append(model_id)
        # Last those with a processor: their text encoders know the tokens of the others.
        written.sort(key=lambda one: (folder / one / "processor").exists())
        for model_id in written:
            write_named_files(family, folder, model_id)


def write_named_files(family: ModelFamily, folder: Path, model_id: str) -> None:
    """Write the files of a toy's components where --model_id looks for them: under their
    original names, or in the model that several share them with.
    """
    known = {one.name: one for one in family.load("components")}
    shared: dict[Path, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, pattern in family.model_files.get(model_id, {}).items():
        place = folder / model_id / known[name].folder
        other, _, own = pattern.rpartition(":")
        target = folder / (other or model_id)
        if other not in ("", model_id) and place.exists():
            shutil.copytree(place, target / known[name].folder, dirs_exist_ok=True)
        if not own.endswith((".safetensors", ".pth", ".bin")) or not place.exists():
            continue
        if own.startswith(known[name].folder):
            continue
        # Several components may be in one file.
        file = target / own.replace("*", "")
        weights, settings = shared.setdefault(file, ({}, {}))
        for path in place.glob("*.safetensors"):
            weights |= load_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if own.endswith(".bin"):
            write_dictionaries(weights, file)
            continue
        if own.endswith(".pth"):
            torch.save(weights, file)
            continue
        entries = json.loads((place / "config.json").read_text())
        settings |= {**entries, **settings}
        header = {"family": family.name, "config": json.dumps(settings)}
        save_file(weights, file, header)


def write_dictionaries(weights: Mapping[str, Any], path: Path) -> None:
    """Write weights as `torch.save` does, in a dictionary for each beginning of names."""
    parts: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        outer, _, inner = name.partition(".")
        parts.setdefault(outer, {})[inner] = weight
    torch.save(parts, path)


@pytest.fixture
def loggers() -> Iterator[None]:
    """Undo what a page's snippets set: levels of dstrain's loggers, handlers of the
    root, Accelerators.
    """
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    forget_accelerator()
    root.handlers[:] = handlers
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("dstrain"):
            logger.setLevel(logging.NOTSET)


@pytest.fixture
def project(toy_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the pages suppose it, with two captioned images; it is the working
    directory.

    Settings are those of --toy, which the pages do not give: images to be edited are
    small.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(toy_models))

    def small(
        spec: PipelineSpec, family: ModelFamily, config: ModelChoice
    ) -> PipelineSpec:
        return with_overrides(spec, family, replace(config, toy=True))

    for module in ("dstrain.runs.resolve", "dstrain.generation.pipeline_source"):
        monkeypatch.setattr(f"{module}.with_overrides", small)
    data = tmp_path / "data/example_image_dataset"
    data.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    for i, image in enumerate(pixels, 1):
        Image.fromarray(image).save(data / f"image_{i}.jpg")
    (data / "metadata.csv").write_text(
        'image,prompt\nimage_1.jpg,"a dog"\nimage_2.jpg,"a cat"\n'
    )
    return tmp_path


LONG = frozenset(
    ROOT / "docs/guide" / f"{name}.md"
    for name in (
        "distillation",
        "families/flux",
        "families/flux2",
        "families/qwen_image",
        "families/wan",
        "lora-files",
        "many-devices",
        "other-trainers",
        "quickstart",
        "training-script",
        "troubleshooting",
        "video",
    )
)
"""Pages that take seconds to run; they are left to `make everything`."""
FROM_NOTHING = (
    ROOT / "README.md",
    ROOT / "docs/guide/first-lora.md",
    ROOT / "docs/guide/quickstart.md",
)
"""Pages whose commands run in an empty folder."""


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize(
    "page",
    everyday.cases(
        (page for page in PAGES if runs(page)), lambda page: page not in LONG
    ),
    ids=shown,
)
def test_every_command_and_snippet_runs_and_prints_what_is_shown(
    page: Path, project: Path, toy_models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_toys(text_of(page), toy_models)
    if page in FROM_NOTHING:
        shutil.rmtree(project / "data")
    names: dict[str, Any] = {}
    for block in blocks(text_of(page)):
        kind, _, note = block.info.partition(" ")
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if note.startswith("file="):
            path = project / note.removeprefix("file=")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(shortened(block.body))
        elif kind == "python":
            snippet = project / f"line_{block.line}.py"
            snippet.write_text(shortened(block.body))
            names = runpy.run_path(str(snippet), names, "page")
        elif kind == "sh" and not note.startswith("no-test"):
            want = int(note.removeprefix("exit=") or 0)
            for words in commands(block.body):
                capfd.readouterr()
                assert PROGRAMS[words[0]](words[1:]) == want, (
                    f"{where}: {shlex.join(words)}"
                )
            printed = capfd.readouterr()
            if block.output is not None:
                assert (printed.err if want else printed.out) == block.output, where


@every(PAGES)
def test_fences_are_of_known_kinds_and_untested_ones_give_a_reason(page: Path) -> None:
    unknown = [
        f"{block.line}: {block.info}"
        for block in blocks(text_of(page))
        if not INFO.fullmatch(block.info)
    ]
    assert not unknown
    assert text_of(page).count("```") == 2 * len(list(blocks(text_of(page))))


def test_few_blocks_are_untested() -> None:
    notes = [
        block.info
        for page in PAGES
        for block in blocks(text_of(page))
        if "no-test" in block.info and page.parent.name != "zh"
    ]
    assert len(notes) <= NOT_RUN, notes


def every_command() -> dict[str, click.Command]:
    """Every command by its words, those of groups and of plugins included."""
    own = command_group().commands
    others = load_extensions().offered("dstrain_commands", click.Command, own)
    known = {**own, **others}
    return {
        **known,
        **{f"{name} {word}": one for name, group in known.items()
           if isinstance(group, click.Group) for word, one in group.commands.items()},
    }  # fmt: skip


@every(tuple(page for page in PAGES if page.parent.name != "decisions"))
def test_every_flag_that_is_named_exists(page: Path) -> None:
    known = {
        f"--{flag.name}"
        for config in (TrainConfig, GenerateConfig)
        for flag in flags(config)
    } | FOREIGN_FLAGS
    known |= {
        name
        for command in (command_group(), *every_command().values())
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    # Those that have advice may be named.
    known |= {f"--{name}".rstrip("*") for names in advice().values() for name in names}
    known |= {
        f"--{option.name}"
        for family in FAMILIES
        for option in load_family(family).options
    }
    known |= {"--flag_name", "--flag-name", "--help"}
    # Of messages about flags that do not exist.
    known |= {"--lora_rnk", "--resolution_max"}
    # Of the page of hooks, whose example adds options.
    known |= {"--bell", "--bell_sound"}
    # Marks within the prompt of a preview.
    known |= {f"--{one}" for one in (*"wdhsln", "ss")}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text_of(page))) <= known


@every(PAGES)
def test_every_link_leads_to_a_file(page: Path) -> None:
    prose = FENCE.sub("", text_of(page))
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    assert [
        link
        for link in links
        if not link.startswith("https:") and not (page.parent / link).is_file()
    ] == []


def test_the_command_line_page_is_as_generated() -> None:
    reference = ROOT / "docs/reference"
    page = runpy.run_path(str(reference / "make_cli.py"))["page"]
    assert (reference / "cli.md").read_text() == page(), (
        "run: python docs/reference/make_cli.py"
    )


def test_the_command_line_page_has_every_command_and_every_option() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    every = every_command()
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    others = [row.split(" | ", 2) for row in sections["Other flags"].splitlines()]
    missing = []
    for name, command in every.items():
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        usage = " ".join(["dstrain", name, *(str(one.metavar) for one in arguments)])
        if f"| `{usage}` |" not in sections["Commands"]:
            missing.append(usage)
        own = "\n".join(part for head, part in sections.items() if f"`{name}`" in head)
        for option in set(command.params) - set(arguments):
            flag = f"| `{option.opts[0]}`"
            texts = [
                row[2]
                for row in others
                if row[0] == flag and {"every command", name} & set(row[1].split(", "))
            ]
            texts += [row for row in own.splitlines() if row.startswith(f"{flag} |")]
            choices = (
                option.type.choices if isinstance(option.type, click.Choice) else ()
            )
            if len(texts) != 1 or not all(
                f"`{one}`" in texts[0] for one in choices if one != "reference"
            ):
                missing.append(f"{name} {option.opts[0]}")
    assert missing == []


@pytest.mark.parametrize(
    "module",
    [
        *("dstrain", "dstrain.plugin", "dstrain.plugin.functional"),
        *("dstrain.plugin.lora", "dstrain.plugin.commands", "dstrain.testing"),
    ],
)
def test_the_page_of_the_interface_lists_every_public_name(module: str) -> None:
    page = (ROOT / "docs/plugins/api.md").read_text()
    section = page.partition(f"\n## `{module}`\n")[2].partition("\n## ")[0]
    listed = [
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(listed) == sorted(import_module(module).__all__)


def test_the_page_of_reliability_has_every_promise_and_no_other() -> None:
    page = (ROOT / "docs/development/reliability.md").read_text()
    rows = re.findall(r"^R(\d+) +(\S.*?)  ", page, re.MULTILINE)
    files = sorted(
        (
            *ROOT.glob("tests/reliability/test_r*.py"),
            *ROOT.glob("plugins/*/tests/test_r[0-9]*.py"),
        )
    )
    found = {
        (path.name, number, words)
        for path in files
        for number, words in rows
        if path.name.startswith(f"test_r{int(number):02}_")
        and words in path.read_text()
    }
    assert {name for name, _, _ in found} == {path.name for path in files}
    assert {(number, words) for _, number, words in found} == set(rows)


@every(PAGES)
def test_pages_use_one_word_for_one_thing(page: Path) -> None:
    """dataset, image, feature cache, resume: as docs/development/terms.md has it."""
    other = r"CPU memory|main memory|data sets?|pictures?|feature stores?|goes on|in one piece|with commas"
    prose = FENCE.sub("", text_of(page))
    assert re.findall(rf"\b(?:{other})\b", prose) == []


LIBRARIES = MappingProxyType(
    {
        # torch's `backward` and diffusers' `from_pretrained` are partly unknown.
        "reportUnknownMemberType": False,
        # pyarrow has no types.
        "reportMissingTypeStubs": False,
        # diffusers' classes are loaded on first use.
        "reportPrivateImportUsage": False,
    }
)
"""Rules of pyright that are left out, since they judge other libraries."""
COMPARES_WITH_DIFFUSERS = frozenset({"test_conformance.py"})
"""Files of examples that call diffusers' pipelines, whose annotations are not what they
take and return.
"""
UNTYPED = (
    "# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false\n"
)
HEADS = MappingProxyType(
    {
        # What ends a cell is its output.
        "docs/guide/notebook.ipynb": "# pyright: reportUnusedExpression=false\n",
        # They read files with pyarrow and safetensors, which have no types.
        "docs/guide/datasets.md": UNTYPED,
        "docs/guide/lora-files.md": UNTYPED,
    }
)
"""What some pages are let off."""


def write_examples(folder: Path) -> int:
    """Write the Python of every page as files; return how many there are."""
    count = 0
    for page in PAGES:
        own = folder / re.sub(r"\W", "_", str(page.relative_to(ROOT)))
        snippets = []
        for block in blocks(text_of(page)):
            kind, _, note = block.info.partition(" ")
            if kind == "python" and not note:
                snippets.append(block.body)
            name = note.removeprefix("file=")
            if (
                kind == "python"
                and note
                and name.rpartition("/")[2] not in (COMPARES_WITH_DIFFUSERS)
            ):
                (own / name).parent.mkdir(parents=True, exist_ok=True)
                (own / name).write_text(block.body)
                count += 1
        if snippets:
            own.mkdir(parents=True, exist_ok=True)
            head = HEADS.get(str(page.relative_to(ROOT)), "")
            (own / "page.py").write_text(head + "\n".join(snippets))
            count += 1
    return count


def test_a_strict_type_checker_finds_nothing_in_the_examples(tmp_path: Path) -> None:
    """Once over all of them: it takes most of its time to read torch."""
    assert write_examples(tmp_path / "examples") > 20
    places = [str(path.parent.parent) for path in ROOT.glob("plugins/*/*/__init__.py")]
    settings = {
        "include": ["examples"],
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT / "core"), *places],
        **LIBRARIES,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = (sys.executable, "-m", "pyright", "--pythonpath", sys.executable)
    done = subprocess.run(
        [*command, "-p", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
