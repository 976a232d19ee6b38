"""Decide how components are kept, from the flags of a command."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from dstrain.config import LoraFile, split_commas
from dstrain.config.options import ModelChoice
from dstrain.config.quantization import FP8_FLAG, parse_storage
from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.graph import PipelineSpec, QuantizationMethod
from dstrain.models import (
    METHODS,
    Files,
    ModelConfig,
    component_at,
    components_of,
    recognize,
)
from dstrain.models.components import Component
from dstrain.models.execution import AS_LOADED, Kept, StoredLayers
from dstrain.models.naming import named_files
from dstrain.models.quantization.methods import method_named
from dstrain.registry import Extensions, ModelFamily

OFFLOAD_FLAG = "--offload_models"
NOTHING_SWAPPED: Mapping[str, int] = MappingProxyType({})


def kept_components(
    config: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
    extensions: Callable[[], Extensions],
    swapped: Mapping[str, int] = NOTHING_SWAPPED,
) -> dict[str, Kept]:
    """Return how each component is kept that the flags name.

    Raises UsageError for what names no component of the variant, and for a method that
    is not known or not installed.

    Args:
        config: The flags.
        family: The family of the components.
        spec: The pipeline they are for.
        models: The given model files.
        extensions: Loads the plugins, which may add methods.
        swapped: Component -> how many of its blocks are swapped.
    """
    known = components_of(family)
    names = _Names(config, family, known, spec, given_expert(spec, family, models))
    requests = parse_storage(config.fp8_models, config.quant_options)
    fp8 = [one for one in requests if one.flag == FP8_FLAG]
    methods = known_methods(extensions()) if config.quant_options else METHODS
    stored: dict[str, dict[StoredLayers, None]] = {}
    for one in requests:
        method = method_named(one.method, methods, one.flag)
        entry = StoredLayers(
            method,
            one.only,
            one.excluded,
            one.flag,
            is_among_others=one.flag == FP8_FLAG and len(fp8) > 1,
        )
        for name in names.meant(one.flag, one.what):
            stored.setdefault(name, {})[entry] = None
    offloaded = dict.fromkeys(
        name
        for what in split_commas(config.offload_models)
        for name in names.meant(OFFLOAD_FLAG, what)
    )
    return {
        name: Kept(
            tuple(stored.get(name, ())),
            swapped.get(name, 0),
            name in offloaded,
            known[name].unquantized if name in stored else (),
        )
        for name in dict.fromkeys((*stored, *offloaded, *swapped))
    }


def with_kept(
    files: Mapping[str, Files],
    kept: Mapping[str, Kept],
    presets: Mapping[str, LoraFile],
) -> dict[str, Files]:
    """Return the files of components with how their weights are kept.

    Args:
        files: Component -> its files.
        kept: Component -> how its weights are kept, where not as they are loaded.
        presets: Component -> the LoRA file that is merged into its weights.
    """
    return {
        name: replace(part, kept=kept.get(name, AS_LOADED), preset=presets.get(name))
        for name, part in files.items()
    }


def storage_options(kept: Mapping[str, Kept]) -> dict[str, str | None]:
    """Return the values of the flags that store components so, by the components' names,
    which mean the same with other model files.
    """
    fp8 = []
    others = []
    for name, one in kept.items():
        for entry in one.methods:
            if entry.flag == FP8_FLAG:
                fp8.append(name)
            else:
                others.append(f"{name}:{entry.method.name}{entry.patterns}")
    return {
        "fp8_models": ",".join(fp8) or None,
        "quant_options": ";".join(others) or None,
    }


def known_methods(extensions: Extensions) -> dict[str, QuantizationMethod]:
    """Return dstrain's methods and those of plugins."""
    return {
        **METHODS,
        **extensions.offered("dstrain_quantizers", QuantizationMethod, METHODS),
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


def check_loaded(kept: Mapping[str, Kept], loaded: Collection[str]) -> None:
    """Refuse to quantize what a command does not load.

    Args:
        kept: How components are kept.
        loaded: The components that the command loads.
    """
    for name, one in kept.items():
        if one.methods and name not in loaded:
            what = f"has no effect: {name} is not loaded"
            raise UsageError(one.methods[0].flag, what, f"it loads {', '.join(loaded)}")


def check_trained(
    kept: Mapping[str, Kept], full: Iterable[str], in_steps: Collection[str]
) -> None:
    """Refuse to quantize what is trained, and to quantize what a training step uses by a method
    that no gradient passes.

    Args:
        kept: How components are kept.
        full: The components of which all or a part is trained, without LoRA.
        in_steps: The components that training steps use.
    """
    for name in full:
        component = name.partition(".")[0]
        for stored in kept.get(component, AS_LOADED).methods:
            what = f"{component} is trained (--trainable_models {name}), so its weights cannot be quantized"
            advice = f"train LoRA on it: --lora_base_model {component}"
            raise UsageError(stored.flag, what, advice)
    for component in in_steps:
        for stored in kept.get(component, AS_LOADED).methods:
            if not stored.method.gives_gradient:
                what = f"{stored.method.name} gives no gradient, and training steps use {component}"
                raise UsageError(stored.flag, what, "use int8_block")


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
