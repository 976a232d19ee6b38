"""Ask plugins how components are kept, as the options of a command say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dstrain.config import LoraFile
from dstrain.config.options import ModelChoice
from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.graph import PipelineSpec, make_plan
from dstrain.graph.keepers import KeeperRequest, Keepers
from dstrain.models import (
    Files,
    ModelConfig,
    component_at,
    components_of,
    recognize,
)
from dstrain.models.components import Component
from dstrain.models.naming import named_files
from dstrain.pipeline.sampling import generate_task
from dstrain.registry import ModelFamily, extensions_in_use


def keeper_request(
    options: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
) -> KeeperRequest:
    """Return the request of a command; what it does with components is to be filled in.

    Args:
        options: Its options.
        family: The family of the components.
        spec: The pipeline they are for.
        models: The given model files.
    """
    known = components_of(family)
    expert = given_expert(spec, family, models)
    names = _Names(options, family, known, spec, expert)
    return KeeperRequest(
        options,
        known,
        names.meant,
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
    return {
        name: replace(part, preset=presets.get(name)) for name, part in files.items()
    }


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


@dataclass(frozen=True)
class _Names:
    """What the flags of a command can call a component."""

    config: ModelChoice
    family: ModelFamily
    known: Mapping[str, Component]
    spec: PipelineSpec
    expert: str
    """The only expert of the denoiser whose files are given; '' for none."""

    @cached_property
    def with_weights(self) -> list[str]:
        """Return the components of the variant that have weights."""
        return [one for one in self.spec.components if not self.known[one].is_folder]

    @cached_property
    def entries(self) -> dict[str, ModelConfig]:
        """Return the files of the model flags by how they were typed."""
        return _entries(self.config, self.family)

    def meant(self, flag: str, what: str) -> list[str]:
        """Return the components that an entry of a flag names, by the name or by the
        files; raises UsageError where it names none.
        """
        experts = self.spec.experts
        if experts is not None and what in experts.roles and self.expert:
            return [experts.component(what, self.expert)]
        if what in self.with_weights:
            return [what]
        if what in self.spec.components:
            raise UsageError(flag, f"has no effect: {what} has no weights")
        advice = f"components: {', '.join(self.with_weights)}"
        if what not in self.entries:
            hint = nearest(what, [*self.with_weights, *self.entries])
            which = f"{self.spec.family} {self.spec.variant}"
            no = f"{what!r} is no component of {which} and no entry of the model flags"
            raise UsageError(flag, no + hint, advice)
        inside = _inside(self.entries[what], list(self.known.values()))
        found = [name for name in inside if name in self.with_weights]
        if not found:
            no = f"these files do not tell which component they are: {what}"
            raise UsageError(flag, no, advice)
        return found


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
