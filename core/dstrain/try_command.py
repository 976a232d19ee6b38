"""The command line that tries trained weights, as a run says it at its end."""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from dstrain.components import Component
from dstrain.errors import DstrainError, StateError
from dstrain.generate import makes_video
from dstrain.model_files import Found, ModelConfig, assign, place_of
from dstrain.sampler import generate_task
from dstrain.setup import Setup
from dstrain.sources import Column
from dstrain.wiring import Wiring


def files_needed(wiring: Wiring) -> tuple[str, ...]:
    """The inputs of inference that are pictures or videos."""
    used = wiring.plan(frozenset(wiring.inputs), generate_task(wiring, guided=False)).used_inputs
    files = (name for name, source in wiring.inputs.items() if isinstance(source, Column) and source.is_file)
    return tuple(name for name in files if name in used)


def generate_command(setup: Setup, found: Found, full: Mapping[str, Path], loras: Mapping[str, Path]) -> str:
    """The command that tries trained weights: those of `full` in the place of the files they were loaded from."""
    toy = setup.config.toy
    replaced = {path for name in full for path in found.files[name].paths}
    others = [] if toy else [config for config in setup.models if not replaced & set(_paths(config))]
    held = _held(others, setup, found)
    # Where only their order tells two experts apart, it is that of the components.
    order = [component.name for component in setup.record.load("components")]
    paths: list[tuple[int, Any]] = [(order.index(name), str(path)) for name, path in full.items()]
    for config, names in zip(others, held, strict=True):
        if config.path and not config.component:
            path = config.path if isinstance(config.path, str) or len(config.path) > 1 else config.path[0]
            paths.append((min(map(order.index, names), default=len(order)), path))
    words = ["dstrain", "generate", "--model", setup.wiring.family, "--variant", setup.wiring.variant]
    given = [path for _, path in sorted(paths, key=itemgetter(0))]
    words += ["--model_paths", json.dumps(given)] if given else ["--toy"] if toy else []
    ids = [f"{config.origin.named}:{config.pattern}" for config in others if config.origin]
    words += ["--model_id_with_origin_paths", ",".join(ids)] if ids else []
    words += ["--hub", setup.config.hub] if ids and setup.config.hub != "modelscope" else []
    bare = {option.name for option in setup.record.options if option.is_flag}
    saving = {option.name for option in setup.record.options if option.saves}
    for name, value in ((n, v) for n, v in setup.config.family_options.items() if n not in saving):
        words += [f"--{name}"] if name in bare else [f"--{name}", value]
    for lora in loras.values():
        words += ["--lora", str(lora)]
    if setup.task.runs_sampler:  # what was trained is a number of steps, without guidance
        words += ["--num_inference_steps", "...", "--guidance_scale", "1"]
    for name in files_needed(setup.wiring):
        words += ["--input", f"{name}=FILE"]
    output = "video.mp4" if makes_video(setup.wiring) else "picture.png"
    lacking = _lacking(setup, {*full, *chain(*held)}) if given or not toy else ()
    advice = f" (add the model files of the other components: {', '.join(lacking)})" if lacking else ""
    return shlex.join([*words, "--prompt", "...", "--output", output]) + advice


def _held(configs: Sequence[ModelConfig], setup: Setup, found: Found) -> list[tuple[str, ...]]:
    """The components in each of these sets of files; of files that are not here, what their place says."""
    known: Sequence[Component] = setup.record.load("components")
    files = dict(found.files)
    here = [replace(config, hub=None) for config in setup.models if _paths(config)]
    with suppress(DstrainError):  # files that the run had no use for, and that do not fit: inference will say so
        files = {**assign(here, known, [component.name for component in known]), **files}
    held = []
    for config in configs:
        paths = set(_paths(config))
        place = place_of(config, known)
        names = tuple(name for name, own in files.items() if paths & set(own.paths))
        held.append(names or ((place,) if place and not paths else ()))
    return held


def _lacking(setup: Setup, held: Collection[str]) -> tuple[str, ...]:
    """The components with weights that inference loads and that are not held."""
    known: Sequence[Component] = setup.record.load("components")
    loaded = setup.wiring.plan(frozenset(setup.wiring.inputs), generate_task(setup.wiring, guided=True)).components[""]
    weights = {component.name for component in known if not component.is_folder}
    return tuple(name for name in loaded if name in weights - set(held))


def _paths(config: ModelConfig) -> tuple[Path, ...]:
    try:
        return config.files().paths
    except StateError:
        return ()
