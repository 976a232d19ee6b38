"""Which variant of a family a run means, and the constants of it that flags change."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from dstrain.config.schema import ModelChoice
from dstrain.data.cells import read_literal
from dstrain.errors import DstrainError, UsageError
from dstrain.graph.inputs import Column, Constant
from dstrain.graph.spec import PipelineSpec
from dstrain.models.components import Component
from dstrain.models.locate import ModelConfig, denoiser_config, place_of
from dstrain.registry.discovery import variant_of
from dstrain.registry.family import ModelFamily


@dataclass(frozen=True)
class Hints:
    """What tells a variant where --variant does not.

    fits: how well a variant fits what is given (a data set's columns, the inputs of
    inference): how many of these it uses, and less how many it lacks; None if it cannot
    do with them. either: take the first if several are left.
    """

    models: Sequence[ModelConfig] = ()
    fits: Callable[[PipelineSpec], tuple[int, int] | None] | None = None
    either: bool = False


def choose_variant(family: ModelFamily, name: str | None, hints: Hints) -> str:
    """The variant named, else what the denoiser's id, columns or inputs, its
    configuration, and other ids leave.

    Raises UsageError naming the candidates if several are left.
    """
    if name is not None or len(family.variants) == 1:
        return variant_of(family, name)
    left = _by_id(family, _denoisers(family, hints.models)) or family.variants
    left = _by_fit(family, left, hints) or left
    if len(left) > 1 and hints.models:
        left = _by_configuration(family, left, hints.models) or left
    if len(left) > 1:
        others = _by_id(family, hints.models)
        left = tuple(variant for variant in left if variant in others) or left
    if len(left) > 1 and not hints.either:
        raise UsageError("--variant", f"could be {', '.join(left)}; say which")
    return left[0]


def with_overrides(
    spec: PipelineSpec, family: ModelFamily, config: ModelChoice
) -> PipelineSpec:
    """The pipeline spec with its settings as flags, or --toy, have them.

    Raises UsageError for text that is no such value, and for the flag of a setting that
    the variant does not have.
    """
    changed: dict[str, Any] = {}
    for option in family.options:
        if (
            option.name in config.family_options
            and option.variants
            and spec.variant not in option.variants
        ):
            raise UsageError(
                f"--{option.name}",
                f"has no effect: it is for {', '.join(option.variants)}",
            )
        known = option.component or option.saves or option.name in spec.settings
        if option.name in config.family_options and not known:
            raise UsageError(
                f"--{option.name}",
                f"has no effect: variant {spec.variant} has no such setting",
            )
    for name, setting in spec.settings.items():
        text = config.family_options.get(name)
        if text is not None:
            changed[name] = replace(setting, value=_constant(name, text, setting))
        elif config.toy and setting.toy is not None:
            changed[name] = replace(setting, value=setting.toy)
    return replace(spec, inputs={**spec.inputs, **changed}) if changed else spec


def fitting_columns(
    columns: Collection[str],
    extra: Collection[str],
    file_keys: Collection[str] | None = None,
) -> Callable[[PipelineSpec], tuple[int, int] | None]:
    """Say how many columns of a data set a variant reads; None if it lacks one that it
    needs, or an extra input.

    file_keys: the columns whose files are loaded; None for all.
    """

    def fits(spec: PipelineSpec) -> tuple[int, int] | None:
        every = {
            name: source
            for name, source in spec.inputs.items()
            if isinstance(source, Column)
        }
        sources = {
            n: s
            for n, s in every.items()
            if file_keys is None or not s.is_file or s.name in file_keys
        }
        present = {
            name: source.name
            for name, source in sources.items()
            if source.name in columns
        }
        if not set(extra) <= {*sources, *present.values()}:
            return None
        used, known = (
            set(present.values()),
            {source.name for source in sources.values()},
        )
        return (
            (len(used), len(used) - len(known))
            if spec.can_train(frozenset(present))
            else None
        )

    return fits


def fitting_inputs(
    inputs: Collection[str],
) -> Callable[[PipelineSpec], tuple[int, int] | None]:
    """Say how many of the inputs given to inference a variant knows; None if it lacks
    one that it needs.
    """

    def fits(spec: PipelineSpec) -> tuple[int, int] | None:
        present = frozenset(inputs) & set(spec.inputs)
        return (
            (len(present), 0) if spec.can_train(present | set(spec.defaults)) else None
        )

    return fits


def _denoisers(family: ModelFamily, models: Sequence[ModelConfig]) -> list[ModelConfig]:
    """The files that are in a folder of the denoiser, or of a part of it; without any,
    those in no known folder.
    """
    known: Sequence[Component] = family.load("components")
    denoiser = next(
        component for component in known if component.name == family.default_trainable
    )
    parts = {component.name for component in known if component.same_keys_as(denoiser)}
    places = [(place_of(config, known), config) for config in models]
    return [config for name, config in places if name in parts] or [
        config for name, config in places if not name
    ]


def _by_id(family: ModelFamily, models: Iterable[ModelConfig]) -> tuple[str, ...]:
    """The variants that some model id means."""
    ids = [config.model_id for config in models if config.model_id]
    patterns = (
        (variant, family.model_ids.get(variant, ())) for variant in family.variants
    )
    return tuple(
        variant
        for variant, known in patterns
        if any(fnmatchcase(one, p) for one in ids for p in known)
    )


def _by_fit(family: ModelFamily, left: Sequence[str], hints: Hints) -> tuple[str, ...]:
    """Of several variants, those that use most of what is given."""
    if hints.fits is None or len(left) == 1:
        return ()
    used = {variant: hints.fits(family.load("pipelines")(variant)) for variant in left}
    most = max((number for number in used.values() if number is not None), default=None)
    return tuple(
        variant
        for variant, number in used.items()
        if number is not None and number == most
    )


def _by_configuration(
    family: ModelFamily, left: Sequence[str], models: Sequence[ModelConfig]
) -> tuple[str, ...]:
    if not family.variants_for:
        return ()
    try:
        content = denoiser_config(family, models)
    except DstrainError:
        return ()  # files that are missing, or that do not fit, are reported with what they are needed for
    fitting = family.load("variants_for")(content)
    return tuple(variant for variant in left if variant in fitting)


def _constant(name: str, text: str, setting: Constant) -> Any:
    """The value of a setting that text gives; raises UsageError, naming the flag, for
    text that is no such value.
    """
    try:
        cell = read_literal(text, setting.as_column(name))
    except ValueError as error:
        raise UsageError(f"--{name}", str(error)) from error
    if cell is None:
        raise UsageError(f"--{name}", "is blank")
    return cell.literal
