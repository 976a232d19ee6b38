"""Find the model files that a command line names."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import exists
from re import fullmatch

from dstrain.config import parse_model_paths, parse_origins
from dstrain.config.options import Hub, ModelChoice
from dstrain.console import get_logger
from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.models.component_files import ModelConfig, component_at, owner_of
from dstrain.models.components import Component, components_of
from dstrain.models.hub import FLAG, ID, ModelSource, chosen_hub
from dstrain.models.naming.folders import (
    Part,
    config_of,
    fitting,
    parts_of_folder,
    refuse_doubt,
)
from dstrain.models.naming.location import located
from dstrain.models.weights import recognize
from dstrain.registry import ModelFamily

ONE_FOLDER = rf"{ID}(@[^:]+)?:(?!/)[^,]+"
"""The pattern of a published model's folder, as a flag of a component names it."""

logger = get_logger(__name__)


def model_configs(
    config: ModelChoice, family: ModelFamily, offline: bool = False
) -> tuple[ModelConfig, ...]:
    """Return the model files of a command line: those of --model_id, --model_paths and
    --model_id_with_origin_paths, and of the family's path flags and switches.

    With `offline`, no hub is asked for missing files. Raises UsageError and StateError for
    a --model_id that means nothing, or leaves doubts, and UsageError for a model that the
    family knows and does not support.
    """
    hub = None if offline else chosen_hub(config.hub)
    if config.model_id is not None:
        refuse_unsupported(family, FLAG, [config.model_id.partition("@")[0]])
    found = list(named_files(config, family, hub))
    given = [
        text
        for one in found
        if one.model_id
        for text in (one.model_id, f"{one.model_id}:{one.pattern}")
    ]
    refuse_unsupported(family, "--model_id_with_origin_paths", given)
    for option in family.options:
        value = config.family_options.get(option.name)
        if value and option.field:
            entries = {option.field: True}
            found.append(ModelConfig(component=option.component, entries=entries))
        elif value and option.component:
            is_here = exists(value) or not fullmatch(ONE_FOLDER, value)
            files = ModelConfig(value, hub=hub) if is_here else _origins(value, hub)[0]
            found.append(replace(files, component=option.component))
    return tuple(found)


def refuse_unsupported(family: ModelFamily, flag: str, given: Iterable[str]) -> None:
    """Raise UsageError for a model that the family does not support, and name it."""
    model = family.unsupported(given)
    if model:
        what = f"{model} is not supported yet by {family.name}"
        variants = f"variants: {', '.join(family.variants)}"
        raise UsageError(flag, what, variants)


def named_files(
    config: ModelChoice, family: ModelFamily, hub: Hub | None
) -> tuple[ModelConfig, ...]:
    """Return the files of the three options that name a model's files; those of --model_id
    are left out whose component the others name.
    """
    paths = [
        ModelConfig(paths, hub=hub) for paths in parse_model_paths(config.model_paths)
    ]
    origins = _origins(config.model_id_with_origin_paths, hub)
    if config.model_id is None:
        return (*paths, *origins)
    parts = parts_of(config.model_id, family, hub)
    kept = without_replaced(parts, [*paths, *origins], family)
    return (*paths, *kept, *origins)


def _origins(text: str | None, hub: Hub | None) -> list[ModelConfig]:
    return [
        ModelConfig(None, name, pattern, revision=revision, hub=hub)
        for name, pattern, revision in parse_origins(text)
    ]


def parts_of(value: str, family: ModelFamily, hub: Hub | None) -> list[Part]:
    """Return what the value of --model_id stands for; as long options would name it."""
    components = list(components_of(family).values())
    where = located(value, [family])
    if isinstance(where, ModelSource):
        return _published_parts(where, family, components, hub)
    if where.is_dir():
        parts = parts_of_folder(where, components)
    else:
        names = tuple(one.name for one in fitting([where], components))
        parts = [Part(config_of([where]), names)]
    return [replace(part, config=replace(part.config, hub=hub)) for part in parts]


def _published_parts(
    published: ModelSource,
    family: ModelFamily,
    components: list[Component],
    hub: Hub | None,
) -> list[Part]:
    """Return the files of a published model that the family's record names, or for another
    id, those in the layout of diffusers.
    """
    patterns = family.model_files.get(published.model_id)
    if patterns is None:
        hint = nearest(published.model_id, family.model_files)
        what = f"the family {family.name} does not list {published.model_id}"
        logger.info(f"{FLAG}: {what}; expected the folders of diffusers{hint}")
        weighty = (one for one in components if not one.is_folder)
        patterns = {one.name: f"{one.folder}/*.safetensors" for one in weighty}
    parts = []
    for name, pattern in patterns.items():
        other, _, own = pattern.rpartition(":")
        model_id = other or published.model_id
        # A revision is one of the model that is named.
        revision = published.revision if model_id == published.model_id else ""
        config = ModelConfig(None, model_id, own, revision=revision, hub=hub)
        parts.append(Part(config, (name,)))
    return parts


def without_replaced(
    parts: Sequence[Part], given: Sequence[ModelConfig], family: ModelFamily
) -> list[ModelConfig]:
    """Return the files of --model_id without those of components that are given otherwise.

    Raises UsageError where it is left open which component is replaced, or which of several
    files is meant; MissingFiles for a given path that does not exist, whose component nothing
    tells.
    """
    components = list(components_of(family).values())
    named = {name for part in parts for name in part.components}
    replaced: set[str] = set()
    for config in given:
        for names in _components_in(config, components):
            candidates = [name for name in names if name in named]
            if len(candidates) > 1:
                what = f"{_named(config)} can be {' or '.join(candidates)}: it is open which it replaces"
                advice = "put it into a folder that is named as in the published model"
                raise UsageError(FLAG, what, advice)
            replaced.update(candidates)
    # Files that are no component at all are left to what reads them, which says so.
    gone = [
        one for one in parts if one.components and replaced.issuperset(one.components)
    ]
    kept = [part for part in parts if part not in gone]
    local = [part for part in kept if part.config.path]
    if local:
        refuse_doubt(local)
    return [part.config for part in kept]


def _components_in(
    config: ModelConfig, components: Sequence[Component]
) -> list[tuple[str, ...]]:
    """Return for each part of files the component that it is, or those it may be."""
    place = component_at(config, components) if config.model_id else ""
    if place:
        return [(place,)]
    try:
        files = config.files()
    except MissingFiles as error:
        if config.model_id:
            what = f"{_named(config)} does not tell by its place what it replaces in {FLAG}"
            advice = "download it first, and name it with --model_paths"
            flag = "--model_id_with_origin_paths"
            raise UsageError(flag, what, advice) from error
        advice = f"beside {FLAG} it must be here: its keys tell what it replaces"
        raise MissingFiles(error.where, error.what, advice) from error
    if files.paths[0].is_dir():
        return []  # a tokenizer's
    found = []
    for alike, part in recognize(files, components):
        owner = owner_of(alike, part)
        names = (owner,) if owner else tuple(one.name for one in alike)
        found.append(names)
    return found


def _named(config: ModelConfig) -> str:
    """Return files as a command line names them."""
    if config.source is not None:
        return f"{config.source.named}:{config.pattern}"
    return config.first
