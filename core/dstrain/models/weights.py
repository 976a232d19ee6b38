"""Find the weights of components in files by their keys, and read them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dstrain.errors import StateError
from dstrain.models.components import Component, Files
from dstrain.models.formats import Shape, Shapes, TensorSlice, join
from dstrain.models.hub import described_shards, missing_shards
from dstrain.models.weight_files import OpenFiles, TensorInfo, shapes_in

LORA_KEY = re.compile(r"[._]lora_(A|B|down|up)\b|\.lokr_w[12]")
"""What is in the key of a matrix of LoRA, of most programs."""


def find_weights(paths: Iterable[Path]) -> dict[str, TensorInfo]:
    """Read the headers of files and return key -> tensor.

    Raises StateError for a file that is absent, damaged or more than tensors, and for
    a key that is there twice.
    """
    found: dict[str, TensorInfo] = {}
    for path in paths:
        for name, shape in shapes_in(path).items():
            if name in found:
                other = found[name].path.name
                what = f"{name!r} is also in {other}; give the files of one model only"
                raise StateError(path, what)
            found[name] = TensorInfo(path, name, shape)
    return found


@dataclass(frozen=True)
class Weights:
    """The weights of a network in some files."""

    tensors: Mapping[str, TensorInfo]
    """Key in the files' format, without prefix -> tensor."""
    parts: Mapping[str, tuple[TensorSlice, ...]]
    """The network's own key -> the parts that are joined to that weight."""

    @classmethod
    def of(cls, files: Files) -> "Weights":
        """Find one component's weights, not read yet; raises as `find_weights` does."""
        tensors = {
            name.removeprefix(files.prefix): tensor
            for name, tensor in find_weights(files.paths).items()
            if name.startswith(files.prefix)
        }
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return cls(tensors, files.checkpoint_format.convert(shapes))

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each weight under the network's own key."""
        return {ours: self._joined_shape(parts) for ours, parts in self.parts.items()}

    def read(self, wanted: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight on the CPU) in the wanted shapes, floating-point ones as
        `dtype`, one after the other: what the caller does not keep is freed.

        Weights of the same parts come after each other and share memory: they are tied.
        """
        names: dict[tuple[TensorSlice, ...], list[str]] = {}
        for ours in wanted:
            names.setdefault(self.parts[ours], []).append(ours)
        # File by file: a network's order of weights need not be that of its files.
        of_files = sorted(names, key=self._files_of)
        used = [self.tensors[part.name] for parts in of_files for part in parts]
        with OpenFiles(used) as files:
            for parts in of_files:
                weight = self._joined(parts, files, dtype)
                for ours in names[parts]:
                    yield ours, weight.reshape(wanted[ours])
                del weight  # else it would live until the next one is read

    def _files_of(self, parts: Sequence[TensorSlice]) -> list[Path]:
        return [self.tensors[part.name].path for part in parts]

    def _joined(
        self, parts: Sequence[TensorSlice], files: OpenFiles, dtype: torch.dtype
    ) -> Tensor:
        """Read and join the parts of one weight."""
        values = []
        for part in parts:
            with files.reading(self.tensors[part.name]) as value:
                own = part.of(value)
                kind = dtype if own.is_floating_point() else own.dtype
                # Copied always: a mapped tensor's alignment depends on the file, and
                # results depend on alignment.
                values.append(
                    own.to(kind, copy=True, memory_format=torch.contiguous_format)
                )
                del own
            del value
        return join(values)

    def _joined_shape(self, parts: Sequence[TensorSlice]) -> Shape:
        tensors = self.tensors
        slices = [
            part.of(torch.empty(tensors[part.name].shape, device="meta"))
            for part in parts
        ]
        try:
            return tuple(join(slices).shape)
        except RuntimeError as error:
            names = ", ".join(part.name for part in parts)
            what = f"{names}: parts of one weight differ in shape"
            raise StateError(tensors[parts[0].name].path, what) from error


def recognize(
    files: Files, components: Sequence[Component]
) -> list[tuple[tuple[Component, ...], Files]]:
    """Find the components in files of weights, each with its part of the files;
    components with the same keys are together.

    Components that take different keys of the files, each of which ignores the others',
    may have them in common.

    Raises StateError if there is none, if there are keys of none, or if components
    cannot be told apart.
    """
    names = list(find_weights(files.paths))
    found: dict[Files, list[Component]] = {}
    taken: dict[str, list[Component]] = {}
    for component in components:
        part = component.part_of(files, names)
        if part is not None:
            found.setdefault(part, []).append(component)
            for name in part.taken(names):
                taken.setdefault(name, []).append(component)
    where = files.paths[0]
    its_names = f"its first names: {', '.join(names[:3])}"
    if not found:
        known = _names(c for c in components if c.key_patterns)
        what = f"matches none of {known}; {its_names}"
        raise StateError(where, what, *_what_else(files.paths, names))
    for fitting in taken.values():
        if not all(component.same_keys_as(fitting[0]) for component in fitting):
            what = f"matches {_names(fitting)} equally well; {its_names}"
            raise StateError(where, what)
    prefixes = tuple(part.prefix for part in found)
    others = [
        name
        for name in names
        if not name.startswith(prefixes)
        and not any(part.checkpoint_format.ignores(name) for part in found)
    ]
    if others:
        these = _names(c for fitting in found.values() for c in fitting)
        what = f"{len(others)} of its names belong to none of {these}"
        raise StateError(where, f"{what}: {', '.join(others[:3])}")
    return [(tuple(fitting), part) for part, fitting in found.items()]


def _what_else(paths: Sequence[Path], names: Iterable[str]) -> Iterator[str]:
    """Say what files are that match no component, if their names tell."""
    if any(map(LORA_KEY.search, names)):
        how = "give --lora to generate with it, --lora_checkpoint to train it further"
        yield f"it is a LoRA, not a model: {how}, --preset_lora_path to train upon it"
    missing = missing_shards([path.name for path in paths])
    if missing:
        what = "give all files of a model, within one list of --model_paths"
        yield f"{described_shards(missing)}; {what}"


def _names(components: Iterable[Component]) -> str:
    return ", ".join(component.name for component in components)
