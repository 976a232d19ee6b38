"""Choose the variant of a family that a run means."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from dstrain.config.options import ModelChoice
from dstrain.data import read_literal
from dstrain.errors import DstrainError, StateError, UsageError
from dstrain.graph import Column, PipelineSpec, as_column
from dstrain.models import Config, Found, ModelConfig, component_at, components_of
from dstrain.models.needed_components import denoiser_config
from dstrain.registry import ModelFamily, variant_of


def fitting_variants(family: ModelFamily, config: Config) -> list[str]:
    """Return the variants whose denoiser has this configuration, if they say."""
    found = []
    for variant in family.variants:
        wanted = family.spec(variant).denoiser_config
        if wanted and not entries_that_differ(wanted, config):
            found.append(variant)
    return found


def entries_that_differ(wanted: Config, config: Config) -> list[str]:
    """Return the entries that a configuration does not have as wanted."""
    found = []
    for name, value in wanted.items():
        have = config.get(name)
        if isinstance(value, bool):
            have = have is not None and have is not False
        elif name not in config:
            continue  # left to the network's default
        if have != value:
            found.append(name)
    return found


def check_denoiser(family: ModelFamily, spec: PipelineSpec, found: Found) -> None:
    """Refuse a denoiser that is another model than the variant is for, by its
    configuration: before its weights are read, and where units read the configuration
    alone.

    Raises StateError that says what the denoiser is.
    """
    # A flag may say what the configuration does not.
    flags = {option.field for option in family.options}
    experts = spec.experts.components if spec.experts else (family.default_trainable,)
    own = spec.denoiser_config.items()
    wanted = {entry: value for entry, value in own if entry not in flags}
    for name in experts:
        config = found.configs.get(name)
        if config is None:
            continue
        differing = entries_that_differ(wanted, config)
        others = [
            model
            for model, entries in family.other_models.items()
            if entries.keys() <= config.keys()
            and not entries_that_differ(entries, config)
        ]
        words = []
        if others:
            words = [f"is {others[0]}, which no variant of {family.name} is for"]
        for entry in differing[:1]:
            has, takes = config.get(entry), wanted[entry] or "none"
            what = f"has {entry} {has}; variant {spec.variant} takes {takes}"
            words.append(what)
        if not words:
            continue
        variants = [] if others else fitting_variants(family, config)
        advice = [f"give --variant {' or '.join(variants)}"] if variants else []
        files = found.files.get(name)
        where = files.paths[0] if files else name
        raise StateError(where, ": it ".join(words), *advice)


Score = tuple[int, int]
"""(names of what is given that a variant uses, less the names that it lacks)."""
Scorer = Callable[[PipelineSpec], Score | None]
"""Rates how well a variant fits what is given (a dataset's columns, the inputs of
inference); None if it cannot run with them.
"""


def score_columns(
    columns: Collection[str],
    extra: Collection[str],
    file_keys: Collection[str] | None = None,
) -> Scorer:
    """Return a function that scores variants by the columns of a dataset that they use;
    None if a variant lacks one that it needs, or does not know an extra input.

    Args:
        columns: The dataset's columns.
        extra: Inputs or columns that the variant has to know.
        file_keys: The columns whose files are loaded; None for all.
    """

    def score(spec: PipelineSpec) -> Score | None:
        known = {
            name: source.name
            for name, source in spec.inputs.items()
            if isinstance(source, Column)
            and (file_keys is None or not source.is_file or source.name in file_keys)
        }
        present = {name: column for name, column in known.items() if column in columns}
        names = {*known, *present.values()}
        if not names.issuperset(extra):
            return None
        if not spec.can_train(frozenset(present)):
            return None
        used = len(set(present.values()))
        return used, used - len(set(known.values()))

    return score


def score_inputs(inputs: Collection[str]) -> Scorer:
    """Return a function that scores variants by the inputs of inference that they use;
    None if a variant lacks one that it needs.
    """

    def score(spec: PipelineSpec) -> Score | None:
        present = frozenset(inputs) & set(spec.inputs)
        if not spec.can_train(present | set(spec.defaults)):
            return None
        return len(present), 0

    return score


STEPS = "num_inference_steps"
TOY_STEPS = 4
"""Most denoising steps of a toy by default: its images are noise after any number."""


def with_overrides(
    spec: PipelineSpec, family: ModelFamily, config: ModelChoice
) -> PipelineSpec:
    """Return the pipeline spec with the constants that flags, or --toy, give, and with
    few denoising steps by default for a toy.

    Raises UsageError for text that is not a valid value, and for the flag of a constant
    that the variant does not have.
    """
    flags = config.family_options
    for option in family.options:
        if option.name not in flags:
            continue
        acts = option.component or option.is_flag or option.name in spec.constants
        variants = option.variants or family.variants
        if not acts or spec.variant not in variants:
            what = f"has no effect: variant {spec.variant} does not use it"
            raise UsageError(f"--{option.name}", what)
    changed: dict[str, Any] = {}
    for name, constant in spec.constants.items():
        if flags.get(name) is not None:
            try:
                cell = read_literal(flags[name], as_column(name, constant))
            except ValueError as error:
                raise UsageError(f"--{name}", str(error)) from error
            if cell is None:
                raise UsageError(f"--{name}", "is blank")
            changed[name] = replace(constant, value=cell.literal)
        elif config.toy and constant.toy is not None:
            changed[name] = replace(constant, value=constant.toy)
    defaults = dict(spec.defaults)
    if config.toy and STEPS in defaults:
        defaults[STEPS] = min(defaults[STEPS], TOY_STEPS)
    return replace(spec, inputs={**spec.inputs, **changed}, defaults=defaults)


def choose_variant(
    family: ModelFamily,
    name: str | None,
    models: Sequence[ModelConfig] = (),
    score: Scorer | None = None,
    take_first: bool = False,
    fits: Scorer | None = None,
) -> str:
    """Return the variant named, else the one left by the id of an adapter or else of the
    denoiser, then the places of other files, then columns or inputs, then the denoiser's
    configuration.

    Raises UsageError naming the candidates if several are left, unless the first of
    them will do, as it does where one id means all of them.

    Args:
        family: The family.
        name: The variant named, if any.
        models: The model files.
        score: Rates variants by columns or inputs.
        take_first: Whether the first of several that are left will do.
        fits: Tells by a score whether a variant can run with what is assumed; asked only if
            several are left.
    """
    if name is not None or len(family.variants) == 1:
        return variant_of(family, name)
    adapters = [one for one in models if _is_adapter(family, one)]
    telling = _by_id(family, adapters) or _by_id(family, _denoisers(family, models))
    left = _narrow(family.variants, telling)
    left = possible = _narrow(left, _by_components(family, models))
    if score is not None:
        scores = {variant: score(family.spec(variant)) for variant in left}
        valid = [one for one in scores.values() if one is not None]
        best = max(valid, default=None)
        left = [variant for variant in left if scores[variant] == best]
    if len(left) > 1:
        # Of one that fits, but not the columns, the error that follows names these.
        left = _narrow(_narrow(possible, _by_config(family, models)), left)
    if len(left) > 1 and fits is not None:
        left = _narrow(left, [one for one in left if fits(family.spec(one))])
    ids = (one.model_id for one in models if one.model_id)
    means_all = any({*left} <= {*family.variants_of(one)} for one in ids)
    if len(left) > 1 and not take_first and not means_all:
        raise UsageError("--variant", f"could be {', '.join(left)}; choose one")
    return left[0]


def _is_adapter(family: ModelFamily, config: ModelConfig) -> bool:
    """Return whether files are of a published model with another one's denoiser."""
    files = family.model_files.get(config.model_id or "", {})
    return ":" in files.get(family.default_trainable, "")


def _denoisers(family: ModelFamily, models: Sequence[ModelConfig]) -> list[ModelConfig]:
    """Return the files in a folder of the denoiser, or of a part of it; if there are
    none, those in no known folder.
    """
    by_name = components_of(family)
    denoiser = by_name[family.default_trainable]
    known = list(by_name.values())
    parts = {one.name for one in known if one.same_keys_as(denoiser)}
    places = [(config, component_at(config, known)) for config in models]
    inside = [config for config, place in places if place in parts]
    return inside or [config for config, place in places if not place]


def _narrow(variants: Sequence[str], fitting: Collection[str]) -> Sequence[str]:
    """Return those of the variants that fit, or all if none does."""
    return [variant for variant in variants if variant in fitting] or variants


def _by_id(family: ModelFamily, models: Iterable[ModelConfig]) -> list[str]:
    """Return the variants that some model id means."""
    ids = [config.model_id for config in models if config.model_id]
    meant = {variant for model_id in ids for variant in family.variants_of(model_id)}
    return [variant for variant in family.model_ids if variant in meant]


def _by_components(family: ModelFamily, models: Iterable[ModelConfig]) -> list[str]:
    """Return the variants that have every component whose place the files are in."""
    known = list(components_of(family).values())
    placed = {component_at(config, known) for config in models} - {""}
    variants = family.variants
    return [one for one in variants if placed.issubset(family.spec(one).components)]


def _by_config(family: ModelFamily, models: Sequence[ModelConfig]) -> Collection[str]:
    """Return the variants that fit the denoiser's configuration."""
    try:
        return fitting_variants(family, denoiser_config(family, models))
    except DstrainError:
        # Missing and unfit files are reported later, with what needs them.
        return ()
