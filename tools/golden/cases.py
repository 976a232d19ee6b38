"""Make the cases of the table `cases.toml` and of the pages of the guide."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).parent
TABLE = MappingProxyType(tomllib.loads((HERE / "cases.toml").read_text("utf-8")))
DOCS = HERE.parents[1] / "docs"
FENCE = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKES_DATA = re.compile(r"save|write|mkdir")
OF_A_MODEL = re.compile(r"dstrain|diffusers|pipe\b")
MOST = {"--max_steps": 20, "--blocks_to_swap": 1, "--num_frames": 5}
"""The largest values of a page's commands. They follow it, as those of `SMALL` do: of an
option given twice the last counts.
"""
SMALL = {
    "train": "--dataset_repeat 1",
    "generate": "--height 64 --width 64 --num_inference_steps 2",
}


@dataclass(frozen=True)
class Case:
    """Commands as words, one after another in one folder."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    """`file NAME TEXT` writes a file and `python SOURCE` runs it; others are dstrain's."""
    material: str = "usual"
    """The folder of the material that it begins with."""


def small_set() -> Iterator[Case]:
    """Yield one case for each mechanism, plans and options, and bad inputs."""
    for way, lines in TABLE["ways"].items():
        yield made("qwen_image", way, lines)
    for name, mechanism in TABLE["mechanisms"].items():
        yield made(mechanism["small"], name, lines_of(mechanism))
    for name, lines in TABLE["printed"].items():
        yield made("qwen_image", name, lines.strip().split("\n"))
    for family, own in TABLE["families"].items():
        variants = own["variants"].split()
        plans = [f"graph --model $family --toy --variant {one}" for one in variants]
        yield made(family, "plans", [*plans, "models $family"])


def everything() -> Iterator[Case]:
    """Yield the small set, all mechanisms of each family, its everyday variants, and the
    commands of the pages.
    """
    yield from small_set()
    for family, facts in TABLE["families"].items():
        for name, mechanism in TABLE["mechanisms"].items():
            is_small = mechanism["small"] == family
            if not is_small and name not in facts.get("without", "").split():
                yield made(family, name, lines_of(mechanism))
        for variant in facts["variants"].split()[: facts["everyday"]]:
            own = f"--variant {variant} {TABLE['columns'].get(variant, '')}"
            trained = TABLE["full"].get(variant, facts["denoiser"])
            kinds = {
                "LoRA": f"{own} --lora_rank 4",
                "full": f"{own} --trainable_models {trained}",
            }
            for way, lines in TABLE["ways"].items():
                for kind, options in kinds.items():
                    name = f"{variant}, {kind}, {way}"
                    yield made(family, name, lines, options)
    for page in sorted({*DOCS.rglob("*.md")} - {*DOCS.glob("zh/*")}):
        case = of_page(page)
        if any(words[0] not in ("file", "python") for words in case.commands):
            yield case


def lines_of(mechanism: Mapping[str, Any]) -> list[str]:
    """Return the command lines of a mechanism."""
    run = f"$train --output_path out --num_epochs 1 {mechanism.get('options')}"
    return mechanism.get("commands") or [run]


def made(family: str, name: str, lines: list[str], options: str = "") -> Case:
    """Return a case of one family; the options are put into its training commands."""
    facts = TABLE["families"][family]
    usual = facts["variants"].split()[0]
    train = f"--model {family} --variant {usual} --toy --dataset_base_path data"
    # Images have sizes of their own.
    has_size = family == "wan" and not any("--resolution" in line for line in lines)
    size = facts["size"] if has_size else ""
    train = f"{train} --batch_size 2 {size} {options}"
    places = {**facts, "family": family, "train": train}
    filled = (Template(line).substitute(places) for line in lines)
    return Case(f"{family}: {name}", tuple(tuple(shlex.split(one)) for one in filled))


def of_page(page: Path) -> Case:
    """Return the commands of a page, of toys and few steps; its files, and its snippets of
    Python that make data, are among them.
    """
    commands: list[tuple[str, ...]] = []
    earlier = ""
    for kind, note, body in FENCE.findall(page.read_text("utf-8")):
        if note.startswith("file="):
            commands.append(("file", note.removeprefix("file="), body))
        elif kind == "python":
            is_alone = not OF_A_MODEL.search(body)
            if MAKES_DATA.search(body) and is_alone:
                commands.append(("python", earlier + body))
            earlier += named(body, is_alone)
        elif kind == "sh" and not note.startswith("no-test"):
            commands += shortened(body)
    return Case(f"page {page.relative_to(DOCS)}", tuple(commands), "pages")


def named(body: str, has_variables: bool) -> str:
    """Return what a later snippet of a page may use: imports, functions and variables."""
    kinds: tuple[type[ast.stmt], ...] = (ast.Import, ast.ImportFrom)
    if has_variables:
        kinds += (ast.FunctionDef, ast.Assign)
    kept = (one for one in ast.parse(body).body if isinstance(one, kinds))
    return "".join(f"{ast.unparse(one)}\n" for one in kept)


def shortened(body: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a block of a page: those of `dstrain`, and scripts."""
    for line in body.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or ("",)
        if program == "python":
            yield ("python", f"import runpy\nrunpy.run_path({words[0]!r})")
        if program != "dstrain" or not words:
            continue
        if "--model_id" in words:
            place = words.index("--model_id")
            words[place : place + 2] = toy_of(words[place + 1])
        more = [SMALL.get("train" if words[0][0] == "-" else words[0], "")]
        given = dict(pairwise(words))
        for option, most in MOST.items():
            if int(given.get(option, "0").partition(",")[0]) > most:
                more.append(f"{option} {most}")
        yield (*words, *" ".join(more).split())


def toy_of(model_id: str) -> list[str]:
    """Return the options that stand for a published model."""
    for part, toy in TABLE["toys"].items():
        if part in model_id:
            return [*toy.split(), "--toy"]
    return ["--model_id", model_id]
