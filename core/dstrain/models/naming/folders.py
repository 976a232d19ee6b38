"""Find the components in a folder: one in a published layout, or one that has a folder for
each kind of model. Tell the family of files by the names of their weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dstrain.errors import MissingFiles, UsageError
from dstrain.models.component_files import ModelConfig, owner_of
from dstrain.models.components import Component, Files, components_of
from dstrain.models.hub import FLAG, SHARD, described_shards, missing_shards
from dstrain.models.weight_files import TORCH_SUFFIXES
from dstrain.models.weights import find_weights
from dstrain.registry import ModelFamily

SAFETENSORS = ".safetensors"
PART_FOLDERS = (
    "diffusion_models",
    "unet",
    "text_encoders",
    "clip",
    "clip_vision",
    "vae",
)
"""Folders of kinds of models that hold components."""
SHARED_WITH_PUBLISHED = "vae"
"""The one of them that published layouts have, too."""


@dataclass(frozen=True)
class Part:
    """Files that `--model_id` stands for."""

    config: ModelConfig
    components: tuple[str, ...]
    """The components that they may be: several where their keys do not tell which."""


def parts_of_folder(folder: Path, components: Sequence[Component]) -> list[Part]:
    """Return the files of components in a folder; files of other models are passed over.

    In a published layout places tell what files are; otherwise, their keys do. Raises
    MissingFiles if there is none, and StateError if shards are absent.
    """
    parts: list[Part] = []
    published = {place for one in components for place in one.folders}
    kinds = set(PART_FOLDERS) - published - {SHARED_WITH_PUBLISHED}
    if not any((folder / kind).is_dir() for kind in kinds):
        parts = _published(folder, components)
    placed = {name for part in parts for name in part.components}
    if any(one.name not in placed for one in components if not one.is_folder):
        found = _recognized(folder, components)
        parts += [part for part in found if not placed.intersection(part.components)]
    if not parts:
        names = [one.name for one in components if not one.is_folder]
        kinds_of = f"{', '.join(PART_FOLDERS)}, or {SAFETENSORS} files"
        advice = f"expected those of a published model, {kinds_of}"
        raise MissingFiles(folder, f"contains no files of {', '.join(names)}", advice)
    return parts


def config_of(paths: Sequence[Path], component: str = "") -> ModelConfig:
    """Return files of one component as model files, a single one as `--model_paths` has it."""
    return ModelConfig(tuple(map(str, paths)), component=component)


def fitting(paths: Sequence[Path], components: Iterable[Component]) -> list[Component]:
    """Return the components whose weights files have, by their keys; raises StateError for
    a file that cannot be read.
    """
    names = list(find_weights(paths))
    files = Files(tuple(paths))
    return [one for one in components if one.part_of(files, names) is not None]


def loose_weights(folder: Path) -> list[Path]:
    """Return the files of weights in the folders of kinds of models, and beside them."""
    found = list(folder.glob(f"*{SAFETENSORS}"))
    for name in PART_FOLDERS:
        found += (folder / name).rglob(f"*{SAFETENSORS}")
    return found


def weight_sets(paths: Iterable[Path]) -> list[list[Path]]:
    """Return files, shards of a model together, sorted; raises MissingFiles."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(paths):
        shard = SHARD.fullmatch(path.name)
        stem = f"{shard[1]}-of-{shard[3]}{shard[4]}" if shard else path.name
        found.setdefault(path.with_name(stem), []).append(path)
    for shards in found.values():
        missing = missing_shards([path.name for path in shards])
        if missing:
            what = described_shards(missing)
            raise MissingFiles(shards[0].parent, what)
    return list(found.values())


def refuse_doubt(parts: Sequence[Part]) -> None:
    """Refuse several sets of files for one component, naming them."""
    for name in dict.fromkeys(name for part in parts for name in part.components):
        able = [part.config.first for part in parts if name in part.components]
        if len(able) > 1:
            what = f"has several files that can be {name}: {', '.join(able)}"
            advice = f"""name the right one as well: --model_paths '["{able[0]}"]'"""
            raise UsageError(FLAG, what, advice)


def _published(folder: Path, components: Iterable[Component]) -> list[Part]:
    """Return the files in the published places of components, diffusers' first."""
    parts = []
    for component in components:
        if component.is_folder:
            continue
        sets: list[list[Path]] = []
        for place in component.folders:
            sets = sets or weight_sets((folder / place).glob(f"*{SAFETENSORS}"))
        originals = [
            path
            for path in folder.iterdir()
            if path.suffix in (SAFETENSORS, *TORCH_SUFFIXES)
            and any(fnmatchcase(path.name, one) for one in component.original_filenames)
        ]
        sets = sets or weight_sets(originals)
        parts += [Part(config_of(paths), (component.name,)) for paths in sets]
    return parts


def _recognized(folder: Path, components: Sequence[Component]) -> list[Part]:
    """Return the files that are components by their keys."""
    parts = []
    for paths in weight_sets(loose_weights(folder)):
        found = fitting(paths, components)
        names = tuple(one.name for one in found)
        owner = owner_of(found, Files(tuple(paths))) if len(found) > 1 else ""
        if owner:
            parts.append(Part(config_of(paths, owner), (owner,)))
        elif names:
            parts.append(Part(config_of(paths), names))
    return parts


def families_of(path: Path, families: Iterable[ModelFamily]) -> list[ModelFamily]:
    """Return the families whose denoiser a file or folder has, else those that have any of its
    weights.

    Raises StateError for a file that cannot be read, and MissingFiles for absent shards.
    """
    sets = [[path]]
    if path.is_dir():
        inside = path.glob(f"*/*{SAFETENSORS}")
        sets = weight_sets({*loose_weights(path), *inside})
    named = [(Files(tuple(paths)), list(find_weights(paths))) for paths in sets]
    by_denoiser = []
    by_any = []
    for family in families:
        try:
            known = components_of(family)
        except UsageError:
            continue  # it cannot be used either
        denoiser = known.get(family.default_trainable)
        parts = ((one, one.part_of(*of)) for one in known.values() for of in named)
        found = [one for one, part in parts if part is not None]
        if denoiser is not None and any(
            one is denoiser or one.same_keys_as(denoiser) for one in found
        ):
            by_denoiser.append(family)
        elif found:
            by_any.append(family)
    return by_denoiser or by_any
