"""Options as the tests of their modules list them."""

from dstrain.config.fields import own_flags


def options_of(config: type) -> dict[str, tuple[object, str]]:
    """Return the own options of a class: name -> default and effects."""
    return {
        flag.name: (flag.default, " ".join(sorted(flag.affects)))
        for flag in own_flags(config)
    }
