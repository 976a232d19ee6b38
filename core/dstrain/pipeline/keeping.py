"""Ask plugins how components are kept, as the options of a command say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dstrain.config import LoraFile
from dstrain.config.options import ModelChoice
from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.graph import PipelineSpec, make_plan
from dstrain.graph.keeper import KeeperRequest
from dstrain.graph.keepers import Keepers
from dstrain.models import Files, ModelConfig, component_at, components_of, recognize
from dstrain.models.components import Component
from dstrain.models.naming import named_files
from dstrain.pipeline.inference_plan import generate_task
from dstrain.registry import ModelFamily, extensions_in_use


def keeper_request(
    options: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
) -> KeeperRequest:
    """Return the request of a command; what it does with components is to be filled in."""
    known = components_of(family)
    with_weights = [one for one in spec.components if not known[one].is_folder]
    expert = given_expert(spec, family, models)

    def meant(flag: str, what: str) -> list[str]:
        if spec.experts is not None and what in spec.experts.roles and expert:
            return [spec.experts.component(what, expert)]
        if what in with_weights:
            return [what]
        if what in spec.components:
            raise UsageError(flag, f"has no effect: {what} has no weights")
        advice = f"components: {', '.join(with_weights)}"
        entries = _entries(options, family)
        if what not in entries:
            hint = nearest(what, [*with_weights, *entries])
            which = f"{spec.family} {spec.variant}"
            no = f"{what!r} is no component of {which} and no entry of the model flags"
            raise UsageError(flag, no + hint, advice)
        inside = _inside(entries[what], list(known.values()))
        found = [name for name in inside if name in with_weights]
        if not found:
            no = f"these files do not tell which component they are: {what}"
            raise UsageError(flag, no, advice)
        return found

    return KeeperRequest(
        options,
        known,
        meant,
        of_variant=spec.components,
        variant=spec.where,
        denoisers=spec.experts.components
        if spec.experts
        else (family.default_trainable,),
    )


def keepers_for_inference(
    options: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
) -> Keepers:
    """Return how components are kept that inference loads; raises what hooks raise."""
    plan = make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
    request = replace(
        keeper_request(options, family, spec, models),
        loaded=plan.components[""],
        used=plan.components[""],
        stage="generate",
    )
    return extensions_in_use().keepers(request)


def with_presets(
    files: Mapping[str, Files], presets: Mapping[str, LoraFile]
) -> dict[str, Files]:
    """Return the files of components with the LoRA files merged into their weights.

    presets: Component -> its LoRA file.
    """
    return {name: replace(one, preset=presets.get(name)) for name, one in files.items()}


def given_expert(
    spec: PipelineSpec, family: ModelFamily, models: Iterable[ModelConfig]
) -> str:
    """Return the only expert of the denoiser whose files are given; '' if there are no
    experts, or not one alone is given.
    """
    if spec.experts is None:
        return ""
    known = family.load("components")
    given = {component_at(model, known) for model in models}
    experts = [name for name in spec.experts.components if name in given]
    return experts[0] if len(experts) == 1 else ""


def _entries(config: ModelChoice, family: ModelFamily) -> dict[str, ModelConfig]:
    """Return the files of the model flags by how they are typed, those of --model_id as the
    long flags name them; each file of several stands for all.
    """
    found = {}
    for one in named_files(config, family, None):
        if one.source is not None:
            found[f"{one.source.named}:{one.pattern}"] = one
        for path in [one.path] if isinstance(one.path, str) else one.path or ():
            found[path] = one
    return found


def _inside(config: ModelConfig, known: Sequence[Component]) -> list[str]:
    """Return the components that files are, by their place or else their content; none
    where files of several components have the same keys, or are not on this machine.
    """
    place = component_at(config, known)
    if place:
        return [place]
    try:
        parts = recognize(config.files(), known)
    except MissingFiles:
        return []
    if any(len(fitting) > 1 for fitting, _ in parts):
        return []
    return [fitting[0].name for fitting, _ in parts]
