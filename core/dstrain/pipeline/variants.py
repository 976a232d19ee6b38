"""Which variant of a family a run means, and the constants of it that flags change."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from dstrain.config.schema import ModelChoice
from dstrain.data.cells import read_literal
from dstrain.errors import DstrainError, UsageError
from dstrain.graph.inputs import Column, Setting
from dstrain.graph.spec import Wiring
from dstrain.models.components import Component
from dstrain.models.locate import ModelConfig, denoiser_configuration, place_of
from dstrain.registry.discovery import variant_of
from dstrain.registry.family import ModelRecord


@dataclass(frozen=True)
class Hints:
    """What tells a variant where --variant does not.

    fits: how well a variant fits what is given (a data set's columns, the inputs of
    inference): how many of these it uses, and less how many it lacks; None if it cannot
    do with them. either: take the first if several are left.
    """

    models: Sequence[ModelConfig] = ()
    fits: Callable[[Wiring], tuple[int, int] | None] | None = None
    either: bool = False


def choose_variant(record: ModelRecord, name: str | None, hints: Hints) -> str:
    """The variant named, else what the denoiser's id, columns or inputs, its
    configuration, and other ids leave.

    Raises UsageError naming the candidates if several are left.
    """
    if name is not None or len(record.variants) == 1:
        return variant_of(record, name)
    left = _by_id(record, _denoisers(record, hints.models)) or record.variants
    left = _by_fit(record, left, hints) or left
    if len(left) > 1 and hints.models:
        left = _by_configuration(record, left, hints.models) or left
    if len(left) > 1:
        others = _by_id(record, hints.models)
        left = tuple(variant for variant in left if variant in others) or left
    if len(left) > 1 and not hints.either:
        raise UsageError("--variant", f"could be {', '.join(left)}; say which")
    return left[0]


def settled(wiring: Wiring, record: ModelRecord, config: ModelChoice) -> Wiring:
    """The wiring with its settings as flags, or --toy, have them.

    Raises UsageError for text that is no such value, and for the flag of a setting that
    the variant does not have.
    """
    changed: dict[str, Any] = {}
    for option in record.options:
        if (
            option.name in config.family_options
            and option.variants
            and wiring.variant not in option.variants
        ):
            raise UsageError(
                f"--{option.name}",
                f"would do nothing: it is for {', '.join(option.variants)}",
            )
        known = option.component or option.saves or option.name in wiring.settings
        if option.name in config.family_options and not known:
            raise UsageError(
                f"--{option.name}",
                f"would do nothing: variant {wiring.variant} has no such setting",
            )
    for name, setting in wiring.settings.items():
        text = config.family_options.get(name)
        if text is not None:
            changed[name] = replace(setting, value=_constant(name, text, setting))
        elif config.toy and setting.toy is not None:
            changed[name] = replace(setting, value=setting.toy)
    return replace(wiring, inputs={**wiring.inputs, **changed}) if changed else wiring


def fitting_columns(
    columns: Collection[str],
    extra: Collection[str],
    file_keys: Collection[str] | None = None,
) -> Callable[[Wiring], tuple[int, int] | None]:
    """Say how many columns of a data set a variant reads; None if it lacks one that it
    needs, or an extra input.

    file_keys: the columns whose files are loaded; None for all.
    """

    def fits(wiring: Wiring) -> tuple[int, int] | None:
        every = {
            name: source
            for name, source in wiring.inputs.items()
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
            if wiring.can_train(frozenset(present))
            else None
        )

    return fits


def fitting_inputs(
    inputs: Collection[str],
) -> Callable[[Wiring], tuple[int, int] | None]:
    """Say how many of the inputs given to inference a variant knows; None if it lacks
    one that it needs.
    """

    def fits(wiring: Wiring) -> tuple[int, int] | None:
        present = frozenset(inputs) & set(wiring.inputs)
        return (
            (len(present), 0)
            if wiring.can_train(present | set(wiring.defaults))
            else None
        )

    return fits


def _denoisers(record: ModelRecord, models: Sequence[ModelConfig]) -> list[ModelConfig]:
    """The files that are in a folder of the denoiser, or of a part of it; without any,
    those in no known folder.
    """
    known: Sequence[Component] = record.load("components")
    denoiser = next(
        component for component in known if component.name == record.default_trainable
    )
    parts = {component.name for component in known if component.is_twin(denoiser)}
    places = [(place_of(config, known), config) for config in models]
    return [config for name, config in places if name in parts] or [
        config for name, config in places if not name
    ]


def _by_id(record: ModelRecord, models: Iterable[ModelConfig]) -> tuple[str, ...]:
    """The variants that some model id means."""
    ids = [config.model_id for config in models if config.model_id]
    patterns = (
        (variant, record.model_ids.get(variant, ())) for variant in record.variants
    )
    return tuple(
        variant
        for variant, known in patterns
        if any(fnmatchcase(one, p) for one in ids for p in known)
    )


def _by_fit(record: ModelRecord, left: Sequence[str], hints: Hints) -> tuple[str, ...]:
    """Of several variants, those that use most of what is given."""
    if hints.fits is None or len(left) == 1:
        return ()
    used = {variant: hints.fits(record.load("wiring")(variant)) for variant in left}
    most = max((number for number in used.values() if number is not None), default=None)
    return tuple(
        variant
        for variant, number in used.items()
        if number is not None and number == most
    )


def _by_configuration(
    record: ModelRecord, left: Sequence[str], models: Sequence[ModelConfig]
) -> tuple[str, ...]:
    if not record.variants_for:
        return ()
    try:
        content = denoiser_configuration(record, models)
    except DstrainError:
        return ()  # files that are missing, or that do not fit, are reported with what they are needed for
    fitting = record.load("variants_for")(content)
    return tuple(variant for variant in left if variant in fitting)


def _constant(name: str, text: str, setting: Setting) -> Any:
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
