"""Compare a denoiser's configuration with the variants that it may be for."""

from dstrain.errors import StateError
from dstrain.graph import PipelineSpec
from dstrain.models import Config, Found
from dstrain.registry import ModelFamily


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
