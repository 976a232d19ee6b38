"""Leave out the files of `--model_id` that others on the command line replace."""

from collections.abc import Sequence

from dstrain.errors import MissingFiles, UsageError
from dstrain.models.component_files import ModelConfig, component_at, owner_of
from dstrain.models.components import Component, components_of
from dstrain.models.naming.folders import Part, refuse_doubt
from dstrain.models.naming.location import FLAG
from dstrain.models.weights import recognize
from dstrain.registry import ModelFamily


def without_replaced(
    parts: Sequence[Part], given: Sequence[ModelConfig], family: ModelFamily
) -> list[ModelConfig]:
    """Return the files of --model_id without those of components that are given otherwise.

    Raises UsageError where it is left open which component is replaced, or which of several
    files is meant; MissingFiles for a given path that does not exist, whose component nothing
    tells.

    Args:
        parts: The files of --model_id.
        given: The files of the other options.
        family: The family of the components.
    """
    components = list(components_of(family).values())
    named = {name for part in parts for name in part.components}
    replaced: set[str] = set()
    doubtful: dict[tuple[str, ...], list[ModelConfig]] = {}
    for config in given:
        for names in _components_in(config, components):
            candidates = tuple(name for name in names if name in named)
            if len(candidates) > 1:
                doubtful.setdefault(candidates, []).append(config)
            replaced.update(candidates[:1] if len(candidates) == 1 else ())
    for candidates, configs in doubtful.items():
        left = [name for name in candidates if name not in replaced]
        # As many files as components: they are taken in the order of the command line.
        if len(left) != len(configs):
            raise UsageError(
                FLAG,
                f"{_named(configs[0])} can be {' or '.join(candidates)}, so that it is open which "
                "of them it replaces",
                "put it into a folder that is named as in the published model, or give files for "
                + " and ".join(candidates),
            )
        replaced.update(left)
    # Files that are no component at all are left to what reads them, which says so.
    kept = [
        part
        for part in parts
        if not part.components or not replaced.issuperset(part.components)
    ]
    local = [part for part in kept if part.config.path]
    if local:
        refuse_doubt(local)
    return [part.config for part in kept]


def _components_in(
    config: ModelConfig, components: Sequence[Component]
) -> list[tuple[str, ...]]:
    """Return for each part of given files the component, or those with the same keys that it
    may be.
    """
    place = component_at(config, components) if config.model_id else ""
    if place:
        return [(place,)]
    try:
        files = config.files()
    except MissingFiles as error:
        if config.model_id:
            raise UsageError(
                "--model_id_with_origin_paths",
                f"{_named(config)} does not tell by its place which component it replaces in {FLAG}",
                f"download it first, and name it with --model_paths; or leave {FLAG} out and name all files",
            ) from error
        advice = (
            f"beside {FLAG} it must be here: its keys tell which component it replaces"
        )
        raise MissingFiles(error.where, error.what, advice) from error
    if files.paths[0].is_dir():
        return []  # a tokenizer's
    found = []
    for fitting, part in recognize(files, components):
        owner = owner_of(fitting, part)
        names = (owner,) if owner else tuple(one.name for one in fitting)
        found.append(names)
    return found


def _named(config: ModelConfig) -> str:
    """Return files as a command line names them."""
    if config.source is not None:
        return f"{config.source.named}:{config.pattern}"
    path = config.path or ""
    return path if isinstance(path, str) else path[0]
