"""From files that were found to a pipeline that holds exactly the components it needs."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from dstrain.errors import StateError
from dstrain.files import read_tensors
from dstrain.lora import load_lora
from dstrain.model_files import Found, ModelConfig, find
from dstrain.pipeline import Pipeline
from dstrain.plugins import load_record
from dstrain.record import ModelRecord
from dstrain.sampler import generate_task
from dstrain.wiring import Wiring
from dstrain.world import default_device


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
    """Put a LoRA file's layers into the component that its header names, else the one whose prefix its keys have.

    Raises StateError if there is none, or if the keys fit several (two experts) and the header names none of them.
    """
    tensors, header = read_tensors(path)
    family = header.get("family", pipeline.wiring.family)
    if family != pipeline.wiring.family:
        raise StateError(str(path), f"is a LoRA for {family}, and this is {pipeline.wiring.family}")
    prefixes = {name: p for name, p in pipeline.record.lora_prefixes.items() if name in pipeline.components}
    fitting = [name for name, prefix in prefixes.items() if all(key.startswith(f"{prefix}.") for key in tensors)]
    if not tensors or not fitting:
        known = ", ".join(f"{prefix}. ({component})" for component, prefix in prefixes.items())
        first = next(iter(tensors), "absent")
        raise StateError(str(path), f"its keys begin with none of {known}; the first is {first}")
    if len(fitting) > 1:
        named = [name for name in fitting if name == header.get("component")]
        if not named:
            raise StateError(str(path), f"fits {' and '.join(fitting)}, and its header does not say which it is of")
        fitting = named
    module = pipeline.components[fitting[0]]
    load_lora(path, module, prefixes[fitting[0]], scale, f"lora{len(getattr(module, 'peft_config', ()))}")
