"""Find which component each set of given model files is."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from dstrain.config.converters import AnyPath
from dstrain.config.options import Hub
from dstrain.errors import MissingFiles, UsageError
from dstrain.graph.frozen import ConvertedField
from dstrain.models.components import Component, Files, components_of
from dstrain.models.formats import Config
from dstrain.models.hub import ModelSource, find_paths
from dstrain.models.weight_files import header
from dstrain.models.weights import recognize
from dstrain.registry import ModelFamily


def _as_text(given: AnyPath | Sequence[AnyPath] | None) -> str | tuple[str, ...] | None:
    if given is None or isinstance(given, (str, Path)):
        return given if given is None else str(given)
    if not isinstance(given, Sequence):
        what = f"path: expected a file or a list, got {given!r}"
        raise UsageError("ModelConfig", what)
    return tuple(str(path) for path in given)


@dataclass(frozen=True)
class ModelConfig:
    """Model files: local paths, or a pattern of file names of a published model."""

    path: ConvertedField[
        AnyPath | Sequence[AnyPath] | None, str | tuple[str, ...] | None
    ] = ConvertedField(_as_text, default=None)
    """A file, or all shards of one component."""
    model_id: str | None = None
    origin_file_pattern: str | None = None
    component: str = ""
    """The component they are, if a flag says so; else the names in the files tell."""
    entries: Config = field(default_factory=dict)
    """Without files: entries that replace those of the component's configuration."""
    revision: str = ""
    """A branch, tag or commit of the published model; '' for the hub's default."""
    hub: Hub | None = "modelscope"
    """The hub to fetch missing files from; None forbids fetching."""

    @property
    def source(self) -> ModelSource | None:
        """Return the published model, if the files are those of one."""
        if not self.model_id:
            return None
        return ModelSource(self.model_id, self.revision, self.hub)

    @property
    def first(self) -> str:
        """Return the first of its paths; '' for the files of a published model."""
        path = self.path or ""
        return path if isinstance(path, str) else path[0]

    @property
    def pattern(self) -> str:
        """Return the pattern of file names; by default all files in no folder."""
        return self.origin_file_pattern or "*"

    def files(self) -> Files:
        """Find the files on this machine.

        Raises StateError naming the place where they should be.
        """
        return replace(self, hub=None).fetch()

    def fetch(self) -> Files:
        """Find the files, fetching those of a published model that are missing.

        Raises what `files` and the hub raise.
        """
        source = self.source
        if source is None:
            paths = [self.path] if isinstance(self.path, str) else self.path or ()
            for path in paths:
                if not Path(path).exists():
                    raise MissingFiles(path, "does not exist")
            return Files(tuple(map(Path, paths)))
        return Files(tuple(find_paths(source, self.pattern)), source.model_id)


def assign(
    configs: Iterable[ModelConfig],
    components: Sequence[Component],
    wanted: Collection[str],
    absent: list[MissingFiles] | None = None,
) -> dict[str, Files]:
    """Find which component each set of files is, from the names in the files.

    One set may hold several components. Files of a published model in the folder of a
    component that is not wanted are not fetched; those whose folder tells nothing are
    fetched one after the other until every wanted component is found. A missing file
    is an error only if a wanted component remains unfound; with `absent`, the error is
    added there instead.
    """
    assigned = Assignment(components, wanted)
    missing: list[MissingFiles] = []
    unplaced: list[ModelConfig] = []
    for config in configs:
        place = component_at(config, components) if config.model_id else ""
        if config.entries or (place and place not in assigned.wanted):
            continue
        try:
            assigned.add(config, config.fetch() if place else config.files())
        except MissingFiles as error:
            if config.model_id and not place:
                unplaced.append(config)
            else:
                missing.append(error)
    for config in unplaced:
        if not assigned.is_complete:
            try:
                assigned.add(config, config.fetch())
            except MissingFiles as error:
                missing.append(error)
    assigned.settle_ambiguous()
    if missing and not assigned.is_complete:
        if absent is None:
            raise missing[0]
        absent.extend(missing)
    return assigned.found


@dataclass
class Assignment:
    """The files found so far."""

    components: Sequence[Component]
    wanted: Collection[str]
    found: dict[str, Files] = field(default_factory=dict)
    """Component -> its files."""
    ambiguous: dict[Files, tuple[Component, ...]] = field(default_factory=dict)
    """Files -> the components with the same keys that they may be."""

    @property
    def is_complete(self) -> bool:
        """Return whether files are found for all wanted components with weights."""
        seen = {one.name for group in self.ambiguous.values() for one in group}
        seen.update(self.found)
        return all(
            component.is_folder or component.name in seen
            for component in self.components
            if component.name in self.wanted
        )

    def add(self, config: ModelConfig, files: Files) -> None:
        """Assign the parts of a set of files.

        Raises what `_parts` raises, and UsageError for a second set of a component.
        """
        for fitting, part in _parts(config, files, self.components):
            name = owner_of(fitting, part)
            if name:
                self._settle(name, part)
            else:
                self.ambiguous[part] = fitting

    def settle_ambiguous(self) -> None:
        """Assign files that may be of several components with the same keys, in order.

        A single set of files is that of the wanted component.
        """
        single = len(self.ambiguous) == 1
        for part, candidates in self.ambiguous.items():
            names = [one.name for one in candidates]
            free = [name for name in names if name not in self.found]
            if single:
                free.sort(key=lambda name: name not in self.wanted)
            self._settle(free[0] if free else names[0], part)
        self.ambiguous = {}

    def _settle(self, name: str, files: Files) -> None:
        other = self.found.setdefault(name, files)
        if other != files:
            both = f"{other.paths[0]} and {files.paths[0]}"
            raise UsageError("model files", f"two sets of files match {name}: {both}")


def owner_of(fitting: Sequence[Component], files: Files) -> str:
    """Return the component that the files are; of several, the one that wrote them, by
    their header, or whose folder they are in, or whose files alone are named so; '' if
    nothing tells.
    """
    if len(fitting) == 1:
        return fitting[0].name
    written_for = header(files.paths[0]).get("component")
    names = [candidate.name for candidate in fitting]
    if written_for in names:
        return written_for
    file = files.paths[0].name.lower()
    inside = [one.name for one in fitting if one.is_in_folder(files.folder)]
    marked = [
        one.name
        for one in fitting
        if any(fnmatchcase(file, mark) for mark in one.expert_filenames)
    ]
    owners = inside[:1] or marked
    return owners[0] if len(owners) == 1 else ""


def saved_weights(family: ModelFamily, component: str, path: Path) -> Files:
    """Return a file with weights of one component, with the format of its keys; raises
    StateError if it is of something else.
    """
    ((_, files),) = recognize(Files((path,)), [components_of(family)[component]])
    return files


def _parts(
    config: ModelConfig, files: Files, components: Sequence[Component]
) -> list[tuple[tuple[Component, ...], Files]]:
    """Return the components in a set of files, those with the same keys together.

    Raises what `recognize` raises, and UsageError for a folder of no component.
    """
    known = [c for c in components if config.component in ("", c.name)]
    path = files.paths[0]
    if not path.is_dir():
        return recognize(files, known)
    folders: list[str] = []
    for component in known:
        if component.is_folder:
            if config.component or component.is_in_folder(path):
                return [((component,), files)]
            folders += component.folders
    raise UsageError(path, f"is a folder; folders of this family: {', '.join(folders)}")


def component_at(config: ModelConfig, components: Sequence[Component]) -> str:
    """Return the component that the place of files tells; '' if it tells none."""
    first = Path(config.first)
    for component in components:
        if config.model_id is not None:
            fits = component.is_published_as(config.pattern)
        else:
            fits = component.is_in_folder(first) or component.is_in_folder(first.parent)
        if fits:
            return component.name
    return ""


def named_models(family: ModelFamily, configs: Iterable[ModelConfig]) -> dict[str, str]:
    """Return the published model that the files of each component are named by, with its
    revision, for those whose place in the model tells what they are.
    """
    known = list(components_of(family).values())
    models = {}
    for config in configs:
        place = component_at(config, known)
        if place and config.source is not None:
            models[place] = config.source.named
    return models
