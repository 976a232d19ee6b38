"""Write a component's weights by the names of a format."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from dstrain.config import Effect
from dstrain.config.options import recorded_values
from dstrain.console import redacted
from dstrain.lora import base_weights, format_named, save_lora_for
from dstrain.models import NATIVE, components_of, to_checkpoint
from dstrain.models.formats import CheckpointFormat
from dstrain.pipeline import MASK
from dstrain.runs.checkpoints.run_identity import kept_identities, optimizer_identity
from dstrain.runs.training_run import TrainingRun
from dstrain.storage import write_tensors
from dstrain.storage.tensor_writer import whole


def save_full(
    path: Path,
    module: nn.Module,
    config: Mapping[str, Any],
    metadata: Mapping[str, str],
    checkpoint_format: CheckpointFormat = NATIVE,
) -> None:
    """Write one component's weights, by default named as its own `save_pretrained`
    would; `config` is kept as JSON in the header.

    Raises SystemFault.
    """
    header = {"format": "pt", **metadata, "config": json.dumps(config, sort_keys=True)}
    write_tensors(path, published(module, checkpoint_format), header, checksum=True)


def published(
    module: nn.Module, checkpoint_format: CheckpointFormat
) -> dict[str, Tensor]:
    """Return the module's weights by the names of a format, or of its published files.

    transformers names the layers of some models otherwise in memory, and leaves out
    weights tied to another. Weights whose rows lie on several processes stay so where
    the names are the network's own; else every process puts each together.
    """
    state: dict[str, Tensor] = module.state_dict()
    tied = getattr(module, "all_tied_weights_keys", None)
    if checkpoint_format is NATIVE and tied is None:
        return state
    state = {name: whole(value).cpu() for name, value in state.items()}
    untied = {name: value for name, value in state.items() if name not in (tied or ())}
    if checkpoint_format is not NATIVE:
        return to_checkpoint(checkpoint_format, untied)
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(module, untied)
    return reverted


def save_component(
    run: TrainingRun,
    path: Path,
    component: str,
    entries: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write one file of weights, with more entries of its header."""
    setup = run.setup
    network = run.module.pipeline.components[component]
    header: dict[str, Any] = {
        "family": setup.spec.family,
        "variant": setup.spec.variant,
        "component": component,
        "step": str(run.step),
        "task": setup.task.name,
        **entries,
        **{f"version.{name}": one for name, one in setup.versions.items()},
    }
    experts = setup.spec.experts
    expert = experts.expert_of(component) if experts else ""
    if experts is not None and expert:
        low, high = experts.ranges[expert]
        header["timesteps"] = f"{low:g} to {high:g}"
    model_config = run.found.configs[component]
    lora_config = run.module.trained.lora.get(component)
    family = setup.family
    program = setup.saved_names(component)
    if lora_config is None:
        save_full(path, network, model_config, header, key_format(run, component))
        return
    effects: tuple[Effect, ...] = ("recipe", "training")
    if MASK in setup.spec.inputs:
        effects += ("mask",)
    values = recorded_values(setup.typed, *effects) | setup.objective
    recipe = {
        name: redacted(value) if isinstance(value, str) else value
        for name, value in values.items()
    }
    recipe["learning_rate"] = setup.optimizer.rates.plain
    recipe |= optimizer_identity(setup)
    stored = kept_identities(run, {}).get("kept")
    if stored:
        recipe["stored"] = stored
    recipe["steps"] = run.step
    if setup.preset is not None:
        recipe["preset_lora"] = setup.preset.digest
    header["base"] = base_weights(run.found.files[component])
    header |= {"config": model_config, "recipe": recipe}
    save_lora_for(program, path, network, lora_config, family, header)


def key_format(run: TrainingRun, component: str) -> CheckpointFormat:
    """Return the format of the keys of a component's weights files."""
    family = run.setup.family
    program = format_named(run.setup.saved_names(component))
    config = run.found.configs[component]
    found = program.weights(components_of(family)[component], family, config)
    assert found is not None  # `check_saved_names` has refused the others
    return found
