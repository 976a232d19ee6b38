"""Decide how components are kept, from the flags of a command."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dstrain.config.fields import parse_model_paths, parse_origins
from dstrain.config.options.model import ModelChoice
from dstrain.config.quantization import StorageRequest, parse_storage
from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.graph.quantization import QuantizationMethod
from dstrain.graph.spec import PipelineSpec
from dstrain.models.component_files import ModelConfig, component_at
from dstrain.models.components import Component, components_of
from dstrain.models.execution.kept import Kept, StoredLayers
from dstrain.models.quantization.methods import METHODS, method_named
from dstrain.models.weights import recognize
from dstrain.registry.family import ModelFamily
from dstrain.registry.hooks import Extensions


def kept_components(
    config: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
    extensions: Callable[[], Extensions],
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
    """
    requests = parse_storage(config.fp8_models, config.quant_options)
    if not requests:
        return {}
    methods = known_methods(extensions()) if config.quant_options else METHODS
    found: dict[str, dict[StoredLayers, None]] = {}
    for one in requests:
        method = method_named(one.method, methods, one.flag)
        stored = StoredLayers(method, one.only, one.excluded)
        for name in _named(one, config, family, spec, models):
            found.setdefault(name, {})[stored] = None
    return {name: Kept(tuple(entries)) for name, entries in found.items()}


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


def check_loaded(
    kept: Mapping[str, Kept], config: ModelChoice, loaded: Collection[str]
) -> None:
    """Refuse to store what a command does not load.

    Args:
        kept: How components are kept.
        config: The flags that say so.
        loaded: The components that the command loads.
    """
    for name, one in kept.items():
        if one.methods and name not in loaded:
            what = f"has no effect: {name} is not loaded"
            raise UsageError(_flag_of(config), what, f"it loads {', '.join(loaded)}")


def check_trained(
    kept: Mapping[str, Kept],
    config: ModelChoice,
    full: Iterable[str],
    in_steps: Collection[str],
) -> None:
    """Refuse to store what is trained, and to store what a training step uses by a method
    that no gradient passes.

    Args:
        kept: How components are kept.
        config: The flags that say so.
        full: The components of which all or a part is trained, without LoRA.
        in_steps: The components that training steps use.
    """
    flag = _flag_of(config)
    for name in full:
        component = name.partition(".")[0]
        if component in kept and kept[component].methods:
            what = f"{component} is trained (--trainable_models {name}), so its weights cannot be stored in fewer bytes"
            raise UsageError(
                flag, what, f"train LoRA on it: --lora_base_model {component}"
            )
    for component in in_steps:
        for stored in kept.get(component, Kept()).methods:
            if not stored.method.gives_gradient:
                what = f"{stored.method.name} gives no gradient, and training steps use {component}"
                raise UsageError(flag, what, "use int8_block")


def _flag_of(config: ModelChoice) -> str:
    return "--quant_options" if config.quant_options else "--fp8_models"


def _named(
    request: StorageRequest,
    config: ModelChoice,
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
) -> list[str]:
    """Return the components that an entry of a flag names."""
    what = request.what
    by_name = components_of(family)
    names = [name for name in spec.components if not by_name[name].is_folder]
    if spec.experts is not None and what == spec.experts.denoiser:
        expert = given_expert(spec, family, models)
        if expert:
            return [expert]
    if what in names:
        return [what]
    entries = _entries(config)
    if what not in entries:
        hint = nearest(what, [*names, *entries])
        raise UsageError(
            request.flag,
            f"{what!r} is no component of {spec.family} {spec.variant} and no entry of the model flags{hint}",
            f"components: {', '.join(names)}",
        )
    inside = _inside(entries[what], list(by_name.values()))
    found = [name for name in inside if name in names]
    if not found:
        raise UsageError(
            request.flag,
            f"these files do not tell which component they are: {what}",
            f"name the component: {', '.join(names)}",
        )
    return found


def _entries(config: ModelChoice) -> dict[str, ModelConfig]:
    """Return the files of the model flags by how they were typed; each file of several
    stands for all.
    """
    found = {
        path: ModelConfig(paths, hub=None)
        for paths in parse_model_paths(config.model_paths)
        for path in paths
    }
    for name, pattern, revision in parse_origins(config.model_id_with_origin_paths):
        at = f"@{revision}" if revision else ""
        found[f"{name}{at}:{pattern}"] = ModelConfig(
            None, name, pattern, revision=revision, hub=None
        )
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
