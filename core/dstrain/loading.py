"""From file names on the command line to a pipeline that holds exactly the components it needs."""

import fnmatch
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dstrain.components import Component, Files
from dstrain.config import ModelChoice
from dstrain.errors import StateError, UsageError
from dstrain.flags import parse_model_paths, parse_origins
from dstrain.lora import load_lora
from dstrain.networks import find_weights
from dstrain.pipeline import Pipeline
from dstrain.plugins import load_record, variant_of
from dstrain.record import ModelRecord
from dstrain.sampler import generate_task
from dstrain.wiring import Wiring
from dstrain.world import default_device

MODEL_BASE_VARIABLES = ("DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH")


@dataclass(frozen=True)
class ModelConfig:
    """Files of one component: `path` (one, or several shards), or a `model_id` with a pattern of its file names.

    component: which one they are, where a flag says so; otherwise their own names tell.
    """

    path: str | Sequence[str] | None = None
    model_id: str | None = None
    origin_file_pattern: str | None = None
    component: str = ""

    def files(self) -> Files:
        """Find the files; raises StateError naming the place where they were looked for."""
        if self.model_id is None:
            names = [self.path] if isinstance(self.path, str) else list(self.path or ())
            return Files(tuple(_existing(Path(name)) for name in names))
        folder = model_base() / self.model_id
        pattern = self.origin_file_pattern or "*"
        if pattern.endswith("/"):
            return Files((_existing(folder / pattern),), self.model_id)
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not found:
            raise StateError(str(folder / pattern), "no file matches",
                             f"models are looked for below {MODEL_BASE_VARIABLES[0]} (now {model_base()})")  # fmt: skip
        return Files(tuple(found), self.model_id)


def model_base() -> Path:
    """The folder that holds model ids: $DSTRAIN_MODEL_BASE_PATH, or the reference's name for it, or ./models."""
    return Path(next((os.environ[name] for name in MODEL_BASE_VARIABLES if os.environ.get(name)), "models"))


def model_configs(config: ModelChoice, record: ModelRecord) -> tuple[ModelConfig, ...]:
    """The model files of a command line: --model_paths, --model_id_with_origin_paths and the family's path flags."""
    paths = [ModelConfig(path=group) for group in parse_model_paths(config.model_paths)]
    published = [ModelConfig(None, *pair) for pair in parse_origins(config.model_id_with_origin_paths)]
    own = [
        ModelConfig(path=config.family_options[option.name], component=option.component)
        for option in record.options
        if option.component and config.family_options.get(option.name)
    ]
    return (*paths, *published, *own)


def assign(configs: Iterable[ModelConfig], components: Sequence[Component], wanted: Iterable[str]) -> dict[str, Files]:
    """Find which component each set of files is, from the names in the files.

    Files of a model id whose folder is that of a component nobody wants are not even looked for. Files that do not
    exist are an error only if a wanted component remains unfound.
    """
    found: dict[str, Files] = {}
    missing: list[StateError] = []
    needed = set(wanted)
    for config in configs:
        if _published_as(config, components) not in {"", *needed}:
            continue
        try:
            files = config.files()
        except StateError as error:
            missing.append(error)
            continue
        name = config.component or recognise(files, components).name
        if name in found and found[name] != files:
            both = f"{found[name].paths[0]} and {files.paths[0]}"
            raise UsageError("model files", f"two sets of files are {name}: {both}")
        found[name] = files
    absent = [c.name for c in components if c.name in needed - set(found) and not c.is_folder]
    if absent and missing:
        raise missing[0]
    return found


def _published_as(config: ModelConfig, components: Sequence[Component]) -> str:
    """The component whose folder in the published layout a model id's pattern begins with, or ''."""
    folder = (config.origin_file_pattern or "").partition("/")[0] if config.model_id else ""
    return next((component.name for component in components if component.folder == folder), "")


def recognise(files: Files, components: Sequence[Component]) -> Component:
    """The component whose marks are all among the names in the files' headers; a folder is told by its own name."""
    first = files.paths[0]
    if first.is_dir():
        folders = {component.folder: component for component in components if component.is_folder}
        if first.name not in folders:
            raise UsageError(str(first), f"is a folder; folders of this family: {', '.join(folders)}")
        return folders[first.name]
    names = tensor_names(files.paths)
    matches = [c for c in components if c.marks and all(fnmatch.filter(names, mark) for mark in c.marks)]
    if len(matches) != 1:
        known = ", ".join(component.name for component in components if component.marks)
        fits = f"fits {', '.join(c.name for c in matches)} alike" if matches else f"is none of {known}"
        raise StateError(str(first), f"{fits}; its first names: {', '.join(names[:3])}")
    return matches[0]


def tensor_names(paths: Iterable[Path]) -> list[str]:
    """Names of all tensors in safetensors files, from their headers alone; raises StateError for a damaged file."""
    return list(tensor_shapes(paths))


def tensor_shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in safetensors files; raises StateError as `networks.find_weights` does."""
    return {name: place.shape for name, place in find_weights(paths).items()}


def configuration(component: Component, files: Files | None, model_id: str) -> Mapping[str, Any]:
    """The content of a component's configuration: in its weights' header, `config.json` beside it, or published."""
    if files is not None:
        header = _header_config(files)
        if header is not None:
            return header
        beside = files.folder / "config.json"
        if beside.is_file():
            return _read_json(beside)
    folder = model_base() / model_id / component.folder / "config.json" if model_id else None
    if folder is not None and folder.is_file():
        return _read_json(folder)
    if model_id in component.published:
        return component.published[model_id]
    inferred = component.infer(tensor_shapes(files.paths)) if files is not None and component.infer else None
    if inferred is not None:
        return inferred
    place = str(files.folder / "config.json") if files else component.name
    raise StateError(place, f"no configuration of {component.name}: no config.json, the shapes do not tell it, and "
                     f"model id {model_id or '(none)'} is not known", "put config.json beside the weights",
                     f"known ids: {', '.join(component.published) or 'none'}")  # fmt: skip


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(str(path), f"cannot be read: {error}") from error
    return content


def _header_config(files: Files) -> Mapping[str, Any] | None:
    first = files.paths[0]
    if first.is_dir():
        return None
    with safe_open(first, "pt") as file:
        text = (file.metadata() or {}).get("config")
    return json.loads(text) if text else None


@dataclass(frozen=True)
class Found:
    """What was found for a run, before any weight is read: files, and configurations of what is needed."""

    files: Mapping[str, Files]
    contents: Mapping[str, Mapping[str, Any]]


def find(
    record: ModelRecord, configs: Sequence[ModelConfig], components: Iterable[str], bare: Iterable[str] = ()
) -> Found:
    """Find the files of `components`, and configurations of these and `bare`; raises StateError for what is missing."""
    known: Sequence[Component] = record.load("components")
    by_name = {component.name: component for component in known}
    wanted = tuple(components)
    files = assign(configs, known, wanted)
    model_id = next((config.model_id for config in configs if config.model_id), "")
    roots = [found.folder.parent for found in files.values()]
    for name in wanted:
        if name not in files:
            files[name] = _beside(by_name[name], roots, model_id, record)
    contents = {
        name: configuration(by_name[name], files.get(name), files[name].model_id if name in files else model_id)
        for name in (*wanted, *bare)
        if not by_name[name].is_folder
    }
    return Found({name: files[name] for name in wanted}, contents)


def _beside(component: Component, roots: Iterable[Path], model_id: str, record: ModelRecord) -> Files:
    """A folder that no flag named: beside the other files, else below their model id or the family's default."""
    if component.is_folder:
        default = record.default_ids.get(component.name, ":").partition(":")
        places = [root / component.folder for root in roots]
        places += [model_base() / model_id / component.folder] if model_id else []
        places += [model_base() / default[0] / default[2]] if default[0] else []
        for place in places:
            if place.is_dir():
                return Files((place,), model_id)
        raise StateError(component.name, f"not found in {', '.join(dict.fromkeys(map(str, places)))}",
                         f"give --{component.name}_path FOLDER")  # fmt: skip
    raise StateError(component.name, "no model files for it on the command line",
                     "add them to --model_paths or --model_id_with_origin_paths, or use --toy")  # fmt: skip


def load_pipeline(
    record: ModelRecord,
    wiring: Wiring,
    found: Found,
    device: torch.device,
    dtype: torch.dtype,
    full_precision: Iterable[str] = (),
) -> Pipeline:
    """Load what was found, frozen and in eval mode; components named in `full_precision` are loaded in fp32."""
    by_name = {component.name: component for component in record.load("components")}
    configs = {name: by_name[name].configure(content) for name, content in found.contents.items()}
    components = {}
    for name, files in found.files.items():
        module = by_name[name].load(files, configs.get(name), torch.float32 if name in set(full_precision) else dtype)
        if isinstance(module, torch.nn.Module):
            module = module.requires_grad_(False).eval().to(device)
        components[name] = module
    return Pipeline(wiring, record, components, configs, device, dtype)


def open_pipeline(
    family: str,
    configs: Sequence[ModelConfig],
    variant: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    left_out: Collection[str] = (),
) -> Pipeline:
    """Load all that inference with every input would use; model_fn computes in `dtype`."""
    record = load_record(family, left_out)
    wiring: Wiring = record.load("wiring")(variant_of(record, variant))
    plan = wiring.plan(frozenset(wiring.inputs), generate_task(wiring, guided=True))
    found = find(record, configs, plan.components[""], plan.configs[""])
    place = torch.device(device) if device is not None else default_device()
    pipeline = load_pipeline(record, wiring, found, place, dtype)
    pipeline.autocast = None if dtype == torch.float32 else dtype
    return pipeline


def add_lora(pipeline: Pipeline, path: Path, scale: float) -> None:
    """Put a LoRA file's layers into the component whose prefix its keys have; raises StateError if there is none."""
    keys = tensor_names([path])
    for component, prefix in pipeline.record.lora_prefixes.items():
        module = pipeline.components.get(component)
        if module is not None and all(key.startswith(f"{prefix}.") for key in keys):
            load_lora(path, module, prefix, scale, f"lora{len(getattr(module, 'peft_config', ()))}")
            return
    known = ", ".join(f"{prefix}. ({component})" for component, prefix in pipeline.record.lora_prefixes.items())
    raise StateError(str(path), f"its keys begin with none of {known}; the first is {keys[0] if keys else 'absent'}")


def _existing(path: Path) -> Path:
    if not path.exists():
        raise StateError(str(path), "does not exist")
    return path
