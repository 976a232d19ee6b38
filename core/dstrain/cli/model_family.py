"""Tell the family of a model by the value of `--model_id`, where `--model` is left out."""

from collections.abc import Collection

from dstrain.cli.inspection import ready_families
from dstrain.models.naming import family
from dstrain.registry.family import ModelFamily


def family_of(
    value: str, disabled_plugins: Collection[str] = (), in_help: bool = False
) -> ModelFamily | None:
    """Return the only installed family that a model can be of.

    Raises and returns what `dstrain.models.naming.family.family_of` does.

    Args:
        value: The value of `--model_id`.
        disabled_plugins: Names of plugins, or of distributions, to leave out.
        in_help: As there.
    """
    families, broken = ready_families(disabled_plugins)
    lines = [
        f"{one.name} was not asked, since it is broken: {one.reason}" for one in broken
    ]
    return family.family_of(value, families, lines, in_help)
