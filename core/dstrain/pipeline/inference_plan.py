"""Plan inference: what it needs, and the steps for its arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.data import Cell
from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.graph import (
    NEGATIVE,
    POSITIVE,
    FunctionSpec,
    PipelineSpec,
    Plan,
    Task,
    make_plan,
)
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.models import Found, ModelConfig, find
from dstrain.pipeline.loss_masks import LATENTS
from dstrain.pipeline.sampler import SamplerOptions, maker_of
from dstrain.pipeline.start_image import check_start
from dstrain.pipeline.variant_choice import check_denoiser
from dstrain.registry import ModelFamily


def _no_loss() -> None:
    """Stand where a task has its loss: in inference the sampler runs instead."""


def generate_task(spec: PipelineSpec, guided: bool, from_latents: bool = False) -> Task:
    """Return a task that needs what inference needs: the inputs of the latents' shape
    and of the decoders, and the latents of an image or video that it starts from.
    """
    inputs = dict(spec.latent_shape.inputs)
    if from_latents:
        inputs[LATENTS] = True
    components = dict.fromkeys(spec.latent_shape.components)
    decoded: set[str] = set()
    for decoder in spec.decoders:
        for name, is_required in decoder.inputs.items():
            if name not in decoded:
                inputs[name] = is_required
        components |= dict.fromkeys(decoder.components)
        decoded.update(decoder.outputs)
    function = FunctionSpec("generate", _no_loss, inputs, tuple(components))
    branches = (POSITIVE, NEGATIVE) if guided else (POSITIVE,)
    return Task("generate", function, branches, from_rows=False)


def find_for_inference(
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
    keepers: Keepers = AS_LOADED,
    absent: list[MissingFiles] | None = None,
) -> Found:
    """Find the files of everything that inference with any inputs uses, kept so; missing
    ones are added to `absent`, if that is given.
    """
    plan = make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
    found = find(
        family, models, plan.components[""], plan.configs[""], spec.components, absent
    )
    check_denoiser(family, spec, found)
    return found.kept(keepers)


@dataclass(frozen=True)
class InferenceCall:
    """The arguments of one inference, defaults included, and the plan for them."""

    sampling: SamplerOptions
    inputs: dict[str, Any]
    plan: Plan


def plan_inference(
    spec: PipelineSpec,
    arguments: Mapping[str, Any],
    columns: tuple[str, ...] = (),
    family: ModelFamily | None = None,
) -> InferenceCall:
    """Split arguments into the fields of `SamplerOptions` and the variant's inputs (prompt,
    height, ...), add the variant's defaults, and plan.

    Guidance is on if guidance_scale is above the variant's `no_guidance`, and the inputs
    of the negative branch are there. If the scale is an argument, missing texts among them are ''. Raises
    UsageError for an unknown argument, for a scale where there is no such branch, and for a
    required input that is missing.

    Args:
        spec: The pipeline spec.
        arguments: Arguments by name; None counts as absent.
        columns: As in `make_plan`.
        family: The family whose other variants may know an argument.
    """
    values: dict[str, Any] = {k: one.value for k, one in spec.constants.items()}
    values |= spec.defaults
    for name, defaults in spec.defaults_from.items():
        # Those of a preview are not loaded yet: it has the size of its row.
        if (given := arguments.get(name)) and not isinstance(given, Cell):
            values |= defaults(given)
    values |= arguments
    fields = set(SamplerOptions.__dataclass_fields__)
    known = fields | set(spec.inputs)
    for name in values:
        if name not in known:
            what = f"takes no argument {name!r}{nearest(name, known)}"
            others = []
            if family is not None:
                variants = family.variants
                others = [one for one in variants if name in family.spec(one).inputs]
            advice = f"it is an input of {', '.join(others)}; load it with variant=NAME"
            raise UsageError("pipe()", what, *([advice] if others else []))
    inputs = {name: value for name, value in values.items() if value is not None}
    options = {name: inputs.pop(name) for name in fields & inputs.keys()}
    sampling = SamplerOptions(**options)
    make = maker_of(spec, sampling.sampler)
    # Made once here, so that what it refuses is refused before anything is loaded.
    make(spec.schedule, sampling.num_inference_steps, 1, torch.Generator())
    from_latents = sampling.denoising_strength is not None
    if from_latents:
        check_start(spec, inputs)
    guided = sampling.guidance_scale > spec.no_guidance
    negatives = {
        negative for positive, negative in spec.cfg_inputs.items() if positive in inputs
    }
    if guided and arguments.get("guidance_scale"):
        if not spec.branched and "branch" not in spec.model_fn.components:
            what = f"has no effect: {spec.where} has no negative branch"
            raise UsageError(
                "guidance_scale", what, f"give only {', '.join(spec.inputs)}"
            )
        for name in sorted(negatives - {*inputs, *arguments}):
            if spec.inputs[name].kind != "text":
                what = f"above {spec.no_guidance:g} needs input {name!r} for the negative branch, which is absent"
                raise UsageError("guidance_scale", what)
            inputs[name] = ""
    guided = guided and negatives <= inputs.keys()
    task = generate_task(spec, guided, from_latents)
    plan = make_plan(spec, frozenset(inputs), task, columns=columns)
    return InferenceCall(sampling, inputs, plan)
