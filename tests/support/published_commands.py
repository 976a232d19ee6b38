"""Run commands that DiffSynth-Studio publishes, with toys in place of the published models and
noise in place of its datasets: the program's name, the sizes and the number of steps are
ours.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import ModelConfig, TrainConfig
from dstrain.models import NATIVE, component_at, components_of, to_checkpoint
from dstrain.models.formats import from_checkpoint
from dstrain.models.naming import model_configs
from dstrain.models.weight_files import TORCH_SUFFIXES
from dstrain.pipeline import inference_sigmas
from dstrain.plugin import (
    CheckpointFormat,
    Component,
    ModelFamily,
    PipelineSpec,
    same_config,
)
from dstrain.registry import load_family
from dstrain.storage import write_tensors
from dstrain.testing.rows import CAPTIONS, usual_size, write_rows
from dstrain.training import OWN_TASKS
from dstrain.training.losses import LATENTS, SIGMAS
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.once import once
from tests.support.toys import toy

TABLE = Path(__file__).with_suffix(".jsonl")
MODELS = "--model_id_with_origin_paths"
SMALL = {
    "--height": "32",
    "--width": "64",
    "--num_frames": "9",
    "--dataset_repeat": "1",
}
"""Values in place of the published ones, where a command gives any."""
CELLS: dict[str, Any] = {"cfg_scale": 1, "rand_device": "cpu"}
"""Column -> the cells of all rows, where not any text or number will do."""
IMITATION = "trajectory_imitation"
FEW = ("--num_epochs", "1", "--dataset_num_workers", "0")
RESOLVED = re.compile(r"^(\w+) ([\w.-]+), task (\S+), trains (.*)$", re.MULTILINE)
"""What --dry_run says of a command: family, variant, task, trained components."""


@dataclass(frozen=True)
class Published:
    """A command, without the program's name."""

    family: str
    words: tuple[str, ...]
    means: str = ""
    """The variant and the trained components that it resolves to."""
    unsupported: str = ""
    """The model for which it is refused."""

    @cached_property
    def values(self) -> dict[str, str]:
        """Return flag -> value, '' for one that stands alone."""
        found: dict[str, str] = {}
        flag = ""
        for word in self.words:
            if word.startswith("--"):
                flag = word
                found[flag] = ""
            else:
                found[flag] = word
        return found

    @property
    def name(self) -> str:
        """Return a name for tests: the folder of what it writes."""
        return Path(self.values["--output_path"]).name

    @property
    def origins(self) -> list[tuple[str, str]]:
        """Return the model id and the pattern of each set of model files."""
        pairs = [one.partition(":") for one in self.values[MODELS].split(",")]
        return [(model_id, pattern) for model_id, _, pattern in pairs]

    @property
    def columns(self) -> list[str]:
        """Return the columns of its dataset."""
        named = ["video" if self.family == "wan" else "image", "prompt"]
        for flag in ("--data_file_keys", "--extra_inputs"):
            named += self.values.get(flag, "").split(",")
        if self.values.get("--task") == IMITATION:
            named += ["trajectory", "num_inference_steps"]
        return [name for name in dict.fromkeys(named) if name]

    def changed(self, changes: Mapping[str, str | None]) -> "Published":
        """Return the command with other values; None leaves a flag out."""
        words: list[str] = []
        for flag, value in {**self.values, **changes}.items():
            if value is not None:
                words += [flag, value] if value else [flag]
        return replace(self, words=tuple(words))

    def argv(self, *changes: str) -> list[str]:
        """Return the words after `dstrain`, with others at the end."""
        return ["--model", self.family, *self.words, *changes]

    def small(self) -> list[str]:
        """Return the flags that make it small."""
        changes = [
            word
            for flag, value in SMALL.items()
            if flag in self.values
            for word in (flag, value)
        ]
        return [*changes, *FEW]

    @property
    def folders(self) -> list[str]:
        """Return the folders of published models that its flags name."""
        flags = ("--tokenizer_path", "--processor_path")
        given = [self.values.get(flag, "") for flag in flags]
        return [one for one in given if ":" in one]

    def toy(self, variant: str) -> Path:
        """Return the folder of a toy that has each block that the command names."""
        targets = self.values.get("--lora_target_modules", "")
        named = re.findall(r"single_transformer_blocks\.(\d+)\.", targets)
        sizes: dict[str, dict[str, Any]] = {}
        if named:
            sizes = {"dit": {"num_single_layers": 1 + max(map(int, named))}}
        if "mid_block." in targets:
            sizes = {"unet": {"transformer_layers_per_block": [1, 2, 10]}}
        if not sizes:
            return toy(self.family, variant)
        write = load_family(self.family).load("toy")
        name = f"{self.family}-{variant}-{len(named)}"
        return once(name, lambda folder: write(folder, variant, sizes=sizes))


def published_commands() -> list[Published]:
    rows = map(json.loads, TABLE.read_text(encoding="utf-8").splitlines())
    return [
        Published(
            row["family"],
            tuple(row["arguments"]),
            row.get("means", ""),
            row.get("unsupported", ""),
        )
        for row in rows
    ]


def write_header(command: Published, folder: Path) -> None:
    """Write metadata of one row, without the files that it names, for a dry run."""
    if command.values.get("--task") == "sft:train":
        return
    base = folder / command.values["--dataset_base_path"]
    base.mkdir(parents=True, exist_ok=True)
    named = command.values.get("--dataset_metadata_path")
    table = folder / named if named else base / "metadata.csv"
    many = {"eligen_entity_masks", "layer_images"}
    row: dict[str, Any] = {}
    for name in command.columns:
        row[name] = [f"{name}.png"] if name in many else f"{name}.x"
    row["prompt"] = "a dog"
    if "num_inference_steps" in row:
        row["num_inference_steps"] = "2"
    if table.suffix == ".csv":
        cells = [
            json.dumps(one) if isinstance(one, list) else one for one in row.values()
        ]
        table.write_text(
            ",".join(row) + "\n" + ",".join(f'"{c}"' for c in cells) + "\n"
        )
    else:
        lists = {"edit_image", "image"} if "Layered" in command.name else {"edit_image"}
        row |= {name: [value] for name, value in row.items() if name in lists}
        table.write_text(json.dumps([row]))


@dataclass
class StandIns:
    """Toys where published models would be, below a project's `models`."""

    family: ModelFamily
    variant: str
    project: Path
    toy: Path
    """A toy of the variant in the layout of diffusers."""
    folders: Sequence[str] = ()
    """"ID:FOLDER/" of tokenizers, beside those of the family's defaults."""
    configs: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Component -> model id -> the toy's configuration."""

    def write(self, origins: Iterable[tuple[str, str]]) -> None:
        """Write the files that these model ids and patterns mean, and tokenizers."""
        known = components_of(self.family)
        needed = [known[name] for name in self.family.spec(self.variant).components]
        origins = list(origins)
        placed: set[str] = set()
        owners: list[list[Component]] = []
        for model_id, pattern in origins:
            own = self._published(model_id, pattern, needed)
            owners.append(own)
            placed |= {one.name for one in own}
        left = [one for one in needed if not one.is_folder and one.name not in placed]
        for (model_id, pattern), own in zip(origins, owners, strict=True):
            if not own and left:
                own = [left.pop(0)]
            if own:
                self._place(model_id, pattern, own)
        for component in needed:
            if component.is_folder:
                self._place_folder(component, origins[0][0])

    def _published(
        self, model_id: str, pattern: str, needed: list[Component]
    ) -> list[Component]:
        """Return the components that are published in these files."""
        files = self.family.model_files.get(model_id, {})
        names = [name for name, own in files.items() if own == pattern]
        if not names:
            config = ModelConfig(None, model_id, pattern)
            names = [component_at(config, needed)]
        return [one for one in needed if one.name in names]

    def _place(self, model_id: str, pattern: str, own: list[Component]) -> None:
        path = self.project / "models" / model_id / _file_name(pattern)
        if path.exists():
            return
        weights: dict[str, Tensor] = {}
        for component in own:
            folder = self.toy / component.folder
            config = json.loads((folder / "config.json").read_text())
            self.configs.setdefault(component.name, {})[model_id] = config
            for file in sorted(folder.glob("*.safetensors")):
                state = load_file(file)
                form = _form(component, pattern, len(own))
                weights |= to_checkpoint(form, _native(component, state))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in TORCH_SUFFIXES:
            torch.save(_nested(weights), path)
        else:
            save_file(weights, path)

    def _place_folder(self, component: Component, first: str) -> None:
        """Copy a tokenizer to where the family's default or, without one, the first model
        id looks for it, and a flag.
        """
        own = f"{first}:{component.folder}/"
        default = self.family.default_ids.get(component.name, own)
        for place in (default, *self.folders):
            model_id, _, pattern = place.partition(":")
            target = self.project / "models" / model_id / pattern
            if model_id and not target.exists():
                shutil.copytree(self.toy / component.folder, target)

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Let the published models have the toys' configurations meanwhile."""
        known = components_of(self.family)
        with pytest.MonkeyPatch.context() as patch:
            for name, configs in self.configs.items():
                component = known[name]
                _ = component.published
                patch.setitem(
                    component.__dict__, "published", {**component.published, **configs}
                )
            yield


def _file_name(pattern: str) -> str:
    name = pattern.replace("*", "")
    return (
        f"{name[: -len('.safetensors')]}model.safetensors"
        if name.endswith("/.safetensors")
        else name
    )


def _form(component: Component, pattern: str, owners: int) -> CheckpointFormat:
    """Return the format of a file: that of the original publisher where several components
    share it.
    """
    if owners == 1:
        return NATIVE
    return component.formats[0] if component.formats else NATIVE


def _native(component: Component, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a toy under the network's own names."""
    for form in component.formats:
        if form.configuration is same_config:
            return from_checkpoint(form, state)
    return state


def _nested(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return weights as some `.bin` files hold them: a dictionary for each first name."""
    firsts = {name.partition(".")[0] for name in weights}
    if firsts != {"ip_adapter", "image_proj"}:
        return weights
    nested: dict[str, Any] = {first: {} for first in firsts}
    for name, weight in weights.items():
        first, _, rest = name.partition(".")
        nested[first][rest] = weight
    return nested


def make_data(command: Published, variant: str, folder: Path) -> None:
    """Write a dataset of noise with the variant's columns where the command reads one."""
    spec = load_family(command.family).spec(variant)
    task = command.values.get("--task", "sft").partition(":")[0]
    if task != IMITATION:
        spec = spec.with_task_inputs(OWN_TASKS[task])
    base = folder / command.values["--dataset_base_path"]
    shutil.rmtree(base, ignore_errors=True)
    write_rows(spec, base)
    written = base / "metadata.json"
    # Those after them lack what is optional.
    rows = json.loads(written.read_text())[: len(CAPTIONS)]
    for row in rows:
        row |= {name: value for name, value in CELLS.items() if name in row}
        if task == IMITATION:
            row |= _trajectory(spec, base, Path(row["image"]).stem)
    written.write_text(json.dumps(rows))
    named = command.values.get("--dataset_metadata_path")
    if named is None:
        return
    table = folder / named
    if table.suffix == ".csv":
        written.unlink()
        table.write_text(_as_csv(rows))
    elif table != written:
        written.rename(table)


def _trajectory(spec: PipelineSpec, base: Path, name: str) -> dict[str, Any]:
    """Write the latents of a teacher's two steps, of noise, and return a row's cells."""
    size = usual_size(spec)
    shape = spec.latent_shape.function(size.height, size.width)
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 3, *shape[1:], generator=draw)
    sigmas = inference_sigmas(spec.schedule, latents[:, 0], 2)[None]
    file = f"trajectory-{name}.safetensors"
    write_tensors(base / file, {LATENTS: latents, SIGMAS: sigmas}, {}, checksum=True)
    return {"trajectory": file, "num_inference_steps": 2}


def _as_csv(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names)]
    for row in rows:
        cells = []
        for name in names:
            cell = row.get(name, "")
            text = json.dumps(cell) if isinstance(cell, list) else str(cell)
            cells.append('"' + text.replace('"', '""') + '"')
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def shown(words: Iterable[str]) -> str:
    """Return a command as it is typed."""
    return shlex.join(["dstrain", *words])


Main = Callable[[list[str]], int]
"""dstrain's `main`: words -> exit code."""


def assert_means(
    command: Published, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run `dstrain graph` on a command in the working directory: it says the variant and
    what is trained, or names the model that is not supported.
    """
    write_header(command, Path())
    code = main(["graph", *command.argv()])
    said = capsys.readouterr()
    if command.unsupported:
        assert code == 2
        assert re.search(rf" {command.unsupported}[ ,]", said.err)
        return
    found = RESOLVED.search(said.out)
    assert found is not None, said.err
    assert (code, f"{found[2]} {found[4]}") == (0, command.means)


def train(command: Published, variant: str, toy: Path, main: Main) -> int:
    """Run a command in the working directory, at small sizes, for one step: what it starts
    from, another run's LoRA or stage 1's cache, is made first.

    Returns the exit code, the first that is not 0.
    """
    small = command.small()
    one_step = [*small, "--max_steps", "1"]
    start = command.values.get(
        "--lora_checkpoint", command.values.get("--preset_lora_path")
    )
    if start is not None:
        code = _make_lora(command, Path(start), one_step, main)
        if code:
            return code
    if command.values.get("--task") == "sft:train":
        code = _fill_cache(command, variant, toy, main)
        if code:
            return code
    is_stage_1 = command.values.get("--task") == "sft:data_process"
    return main(command.argv(*(small if is_stage_1 else one_step)))


def _fill_cache(command: Published, variant: str, toy: Path, main: Main) -> int:
    """Run stage 1 for a command of stage 2, which names no encoders, on a toy."""
    spec = load_family(command.family).spec(variant)
    write_rows(spec, Path("data-of-stage-1"))
    stage_1 = command.changed(
        {
            "--task": "sft:data_process",
            "--dataset_base_path": "data-of-stage-1",
            "--output_path": command.values["--dataset_base_path"],
            "--model_id": str(toy),
            "--variant": variant,
            "--fp8_models": None,
            "--offload_models": None,
        }
    )
    return main(stage_1.argv(*command.small()))


def _make_lora(command: Published, path: Path, one_step: list[str], main: Main) -> int:
    """Train the LoRA that a command starts from, by the same command without it."""
    starts = ("--lora_checkpoint", "--preset_lora_path", "--preset_lora_model")
    plain = command.changed({**dict.fromkeys(starts), "--output_path": "before"})
    code = main(plain.argv(*one_step))
    if not code:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(Path("before").glob("*.safetensors")), path)
    return code


def long_form(family: ModelFamily, origins: str) -> list[ModelConfig]:
    """Return the model files of --model_id_with_origin_paths, parts separated by spaces."""
    joined = ",".join(origins.split())
    config = TrainConfig(model=family.name, model_id_with_origin_paths=joined)
    return list(model_configs(config, family))


def short_form(family: ModelFamily, model_id: str) -> list[ModelConfig]:
    """Return the model files of --model_id."""
    return list(
        model_configs(TrainConfig(model=family.name, model_id=model_id), family)
    )
