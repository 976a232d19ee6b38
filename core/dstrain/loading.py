"""From files that were found to a pipeline that holds exactly the components it needs."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from dstrain.lora import LoraSpec, add_layers, start_layers
from dstrain.lora_files import read_lora
from dstrain.lora_header import differences
from dstrain.lora_names import shapes_of
from dstrain.model_files import Found, ModelConfig, find
from dstrain.pipeline import Pipeline
from dstrain.plugins import load_record
from dstrain.preset import merge_preset
from dstrain.record import ModelRecord
from dstrain.redaction import warn
from dstrain.sampler import generate_task
from dstrain.trainables import unreached_layers
from dstrain.wiring import Wiring
from dstrain.world import default_device

LONG = 2.0
"""Seconds from which on the loading of a component is told."""


def load_pipeline(
    record: ModelRecord,
    wiring: Wiring,
    found: Found,
    device: torch.device,
    dtype: torch.dtype,
    full_precision: Iterable[str] = (),
    say: Callable[[str], None] | None = None,
) -> Pipeline:
    """Load what was found, frozen and in eval mode; components named in `full_precision` are loaded in fp32.

    say: is told of each preset, and of each component that takes long.
    """
    by_name = {component.name: component for component in record.load("components")}
    configs = {name: by_name[name].configure(content) for name, content in found.contents.items()}
    components = {}
    for name, files in found.files.items():
        start = time.monotonic()
        module = by_name[name].load(files, configs.get(name), torch.float32 if name in set(full_precision) else dtype)
        if isinstance(module, torch.nn.Module):
            module = module.requires_grad_(False).eval().to(device)
            if files.preset is not None:
                merge_preset(module, name, files.preset, record, wiring)
                if say is not None:
                    say(f"preset {files.preset} merged into {name}")
        components[name] = module
        if say is not None and time.monotonic() - start >= LONG:
            say(f"loaded {name} in {time.monotonic() - start:.0f} s")
    return Pipeline(wiring, record, components, configs, device, dtype, files=found.files)


def open_pipeline(
    family: str,
    configs: Sequence[ModelConfig],
    variant: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    left_out: Collection[str] = (),
) -> Pipeline:
    """Load all that inference with every input would use; model_fn computes in `dtype`."""
    from dstrain.variants import Hints, choose_variant

    record = load_record(family, left_out)
    wiring: Wiring = record.load("wiring")(choose_variant(record, variant, Hints(configs)))
    return fill(record, wiring, configs, device, dtype)


def fill(
    record: ModelRecord,
    wiring: Wiring,
    configs: Sequence[ModelConfig],
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Pipeline:
    """Load all that inference with every input of a wiring would use; model_fn computes in `dtype`."""
    plan = wiring.plan(frozenset(wiring.inputs), generate_task(wiring, guided=True))
    found = find(record, configs, plan.components[""], plan.configs[""], wiring.components)
    place = torch.device(device) if device is not None else default_device()
    pipeline = load_pipeline(record, wiring, found, place, dtype)
    pipeline.autocast = None if dtype == torch.float32 else dtype
    return pipeline


def add_lora(pipeline: Pipeline, path: Path, scale: float) -> None:
    """Put a LoRA file's layers, in any naming, into the components that they are of; raises what `read_lora` raises.

    What was taken for granted of the file, and what it was trained with that is another here, is said on stderr.
    """
    for lora in read_lora(path, pipeline.record, lora_shapes(pipeline), spare=spare_layers(pipeline)):
        for line in (*lora.notes, *differences(path, lora.header, pipeline, lora.component)):
            warn(line)
        module = pipeline.components[lora.component]
        add_layers(module, lora.layers, scale, f"lora{len(getattr(module, 'peft_config', ()))}")


def start_from_lora(pipeline: Pipeline, trained: Mapping[str, LoraSpec], path: Path) -> None:
    """Fill the LoRA layers in training, by component, from a file of any naming.

    Raises StateError unless every key, rank and alpha fit.
    """
    spare = spare_layers(pipeline)
    for component, spec in trained.items():
        network = pipeline.components[component]
        for lora in read_lora(path, pipeline.record, {component: shapes_of(network)}, component, spare):
            for note in lora.notes:
                warn(note)
            start_layers(network, lora.layers, spec, str(path), spare[component])


def lora_shapes(pipeline: Pipeline) -> dict[str, dict[str, tuple[int, ...]]]:
    """The networks of a pipeline as `read_lora` wants them."""
    networks = ((name, module) for name, module in pipeline.components.items() if isinstance(module, torch.nn.Module))
    return {name: shapes_of(module) for name, module in networks}


def spare_layers(pipeline: Pipeline) -> dict[str, frozenset[str]]:
    """The layers that no loss reaches, of each network of a pipeline."""
    unreached = pipeline.wiring.unreached
    return {name: unreached_layers(unreached.get(name, ()), shapes) for name, shapes in lora_shapes(pipeline).items()}
