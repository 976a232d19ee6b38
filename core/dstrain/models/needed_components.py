"""Find the files and the configuration of each component that a run needs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dstrain.config.options import Hub
from dstrain.errors import MissingFiles, StateError, UsageError
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.models.component_files import ModelConfig, assign, component_at
from dstrain.models.components import Component, Files, components_of
from dstrain.models.configs import find_config
from dstrain.models.formats import Config
from dstrain.models.hub import model_base
from dstrain.registry import ModelFamily
from dstrain.storage import Digests, hash_json


@dataclass(frozen=True)
class Found:
    """The files and configurations of a run, found before any weight is read."""

    files: Mapping[str, Files]
    configs: Mapping[str, Config]
    keepers: Keepers = AS_LOADED
    """How the weights are kept; a preset is merged before."""

    def kept(self, keepers: Keepers) -> "Found":
        """Return it kept so; raises UsageError for a component that cannot be."""
        for name, config in self.configs.items():
            keepers.identities(name, config)
        return replace(self, keepers=keepers)


def find(
    family: ModelFamily,
    configs: Sequence[ModelConfig],
    components: Iterable[str],
    config_only: Iterable[str] = (),
    among: Collection[str] = (),
    absent: list[MissingFiles] | None = None,
) -> Found:
    """Find the files and the configurations of components.

    Raises StateError for what is missing.

    Args:
        family: The family of the components.
        configs: The given model files.
        components: Those whose files are needed.
        config_only: Those of which the configuration alone is needed.
        among: Those of the variant; another with the same keys as one of these gets none.
        absent: If given, missing files are added here and are no error.
    """
    by_name = components_of(family)
    known = list(by_name.values())
    wanted = tuple(components)
    files = assign(configs, _usable(known, among), wanted, absent)
    weighty = (name for name in wanted if not by_name[name].is_folder)
    lacking = [name for name in weighty if name not in files]
    if lacking and not absent:  # else they may be its files
        what = "no model files for this on the command line"
        advice = "add them to --model_paths, or name a whole model with --model_id"
        raise StateError(", ".join(lacking), what, advice)
    source = next((config for config in configs if config.model_id), None)
    roots: list[Path] = []
    for part in files.values():
        roots += [part.folder.parent, part.folder]
    for name in wanted:
        if name in files or not by_name[name].is_folder:
            continue
        hub = configs[0].hub if configs else None
        default = family.default_ids.get(name, "")
        try:
            files[name] = find_folder(by_name[name], roots, source, default, hub)
        except MissingFiles as error:
            if absent is None:
                raise
            absent.append(error)
    found_configs = {}
    for name in (*wanted, *config_only):
        if by_name[name].is_folder:
            continue
        try:
            given = (by_name[name], files.get(name), configs, known)
            found_configs[name] = _config(*given)
        except StateError:
            # Absent files may have it.
            if not absent or name in files:
                raise
    here = {name: files[name] for name in wanted if name in files}
    return Found(here, found_configs)


def find_given(
    family: ModelFamily,
    configs: Sequence[ModelConfig],
    components: Collection[str],
    among: Collection[str],
) -> Found:
    """Find what the given model files say of components that a run does not load; those
    that are not on this machine are passed over. `among` is as in `find`.
    """
    by_name = components_of(family)
    known = list(by_name.values())
    local = [replace(config, hub=None) for config in configs]
    files: dict[str, Files] = {}
    with suppress(StateError, UsageError):
        files = assign(local, _usable(known, among), components, [])
    files = {name: files[name] for name in components if name in files}
    found_configs = {}
    for name, found in files.items():
        if not by_name[name].is_folder:
            with suppress(StateError):
                found_configs[name] = _config(by_name[name], found, local, known)
    return Found(files, found_configs)


def find_folder(
    component: Component,
    roots: Iterable[Path],
    source: ModelConfig | None,
    default: str,
    hub: Hub | None,
) -> Files:
    """Find the folder of a tokenizer or processor: in one of the roots, in the published
    model that its weights are from, or in the family's own choice, "ID:FOLDER/" or ''; ask a
    hub only if none is here.

    Raises StateError, which names the flag that gives a folder, if there is none, and
    SystemFault if a hub fails.
    """
    published: list[ModelConfig] = []
    if source:
        for folder in component.folders:
            published += [replace(source, origin_file_pattern=f"{folder}/")]
    if default:
        model_id, _, pattern = default.partition(":")
        published.append(ModelConfig(None, model_id, pattern, hub=hub))
    published_places = [
        model_base() / f"{one.model_id}/{one.pattern}" for one in published
    ]
    local = [root / folder for root in roots for folder in component.folders]
    for place in local:
        # A published folder may be fetched in part only; its record is asked below.
        if place.is_dir() and place not in published_places:
            return Files((place,))
    for get in (ModelConfig.files, ModelConfig.fetch):
        for one in published:
            with suppress(StateError):
                return get(one)
    places = ", ".join(dict.fromkeys(map(str, [*local, *published_places])))
    advice = f"give --{component.name}_path FOLDER"
    raise MissingFiles(component.name, f"not found in {places}", advice)


def denoiser_config(family: ModelFamily, configs: Sequence[ModelConfig]) -> Config:
    """Return the configuration of the component that is trained by default, or of a
    component with the same keys.

    Raises what `find` raises for the former if neither is found.
    """
    by_name = components_of(family)
    default = by_name[family.default_trainable]
    offline = [replace(config, hub=None) for config in configs]
    errors: list[StateError] = []
    for candidate in (default, *filter(default.same_keys_as, by_name.values())):
        # The weights of this machine tell more; without them config.json is fetched.
        name = candidate.name
        for places, files, only in ((offline, [name], []), (configs, [], [name])):
            try:
                return find(family, places, files, only).configs[name]
            except StateError as error:
                errors.append(error)
    raise errors[0]


def component_digests(found: Found, digests: Digests) -> dict[str, str]:
    """Return the digest of each component as units use it, and of each configuration;
    they are part of every cache key.
    """
    digest: dict[str, str] = {}
    for name, files in found.files.items():
        parts = [digests.of_all(files.paths), found.configs.get(name, {})]
        if files.preset is not None:
            parts.append(digests.of(files.preset.path))
            if files.preset.changes:
                parts.append({"preset": files.preset.changes})
        for one in found.keepers.identities(name, found.configs.get(name)):
            if one.fact:
                parts.append({one.name: one.value})
        digest[name] = hash_json("component", parts)
    for name, config in found.configs.items():
        digest[f"{name}_config"] = hash_json("config", config)
    return digest


def _usable(known: Sequence[Component], among: Collection[str]) -> list[Component]:
    """Return the components of a variant, and others whose keys none of these has."""
    own = [component for component in known if component.name in among]
    return [c for c in known if c in own or not any(map(c.same_keys_as, own))]


def _config(
    component: Component,
    files: Files | None,
    configs: Sequence[ModelConfig],
    known: Sequence[Component],
) -> Config:
    """Find the configuration of a component, of local files only beside them, with the
    entries that flags replace.
    """

    def is_other(config: ModelConfig) -> bool:
        return component_at(config, known) != component.name

    models = sorted((one for one in configs if one.model_id), key=is_other)
    if files is not None:
        models = [config for config in models if config.model_id == files.model_id]
    source = models[0].source if models else None
    place = None
    if models and (files is not None or not is_other(models[0])):
        place = models[0].pattern.rpartition("/")[0]
    content = dict(find_config(component, files, source, place))
    for config in configs:
        if config.component == component.name:
            content.update(config.entries)
    return content
