"""Networks: built without allocating memory, then filled from safetensors files, strictly in both directions."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dstrain.components import Files
from dstrain.errors import StateError

EXAMPLES = 3
"""How many names an error lists of each kind."""


@dataclass(frozen=True)
class Network:
    """A network class whose constructor takes the configuration's entries as arguments, as those of diffusers do.

    constructor: "package:Class", imported when it is first used, so that a table of networks costs nothing.
    """

    constructor: str

    def configure(self, data: Mapping[str, Any]) -> SimpleNamespace:
        """Return what `config.json` holds as attributes, defaults filled in, equal to the built module's `config`.

        Entries that the constructor does not take (version marks, retired ones) are left out.
        """
        parameters = inspect.signature(self._class().__init__).parameters.values()
        entries = {p.name: data.get(p.name, p.default) for p in parameters if p.name != "self"}
        return SimpleNamespace(
            **{name: value for name, value in entries.items() if value is not inspect.Parameter.empty}
        )

    def load(self, files: Files, configuration: Any, dtype: torch.dtype) -> nn.Module:
        """Build the network for a configuration from `configure` and fill it; raises what `load_network` raises."""
        return load_network(lambda: self._class()(**vars(configuration)), files, dtype)

    def _class(self) -> Any:
        module, _, name = self.constructor.partition(":")
        return getattr(import_module(module), name)


class Place(NamedTuple):
    """Where a weight lies: its file, its name there, and its shape."""

    path: Path
    name: str
    shape: tuple[int, ...]


def load_network(
    build: Callable[[], nn.Module], files: Files, dtype: torch.dtype, rename: Callable[[str], str] = str
) -> nn.Module:
    """Build a network and fill it from one or more shard files; it is in eval mode, on the CPU.

    dtype: of all floating-point weights, whatever the files hold. rename: name in the files -> the module's own name.
    Raises StateError, before any weight is read, when names or shapes of files and network differ.
    """
    from accelerate import init_empty_weights  # slow to import, and planning needs this module but no weights

    # Buffers are computed by the constructor and are not in the files, so they must be real.
    with init_empty_weights(include_buffers=False):
        network = build()
    places = find_weights(files.paths, rename)
    _refuse_misfit(network, places, str(files.folder))
    network.load_state_dict(_read(places, dtype), strict=True, assign=True)
    return network.eval()


def find_weights(paths: Iterable[Path], rename: Callable[[str], str] = str) -> dict[str, Place]:
    """Read the headers of safetensors files: weight, as renamed -> where it lies.

    Raises StateError for a file that is absent or damaged, and for a weight that is there twice.
    """
    places: dict[str, Place] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                # SIM118: a safetensors file has keys() and is itself not iterable.
                found = [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StateError(str(path), f"cannot be read as safetensors: {error}") from error
        for name, shape in found:
            own = rename(name)
            if own in places:
                raise StateError(
                    str(path), f"{name!r} is also in {places[own].path.name}; give the files of one model only"
                )
            places[own] = Place(path, name, shape)
    return places


def _read(places: Mapping[str, Place], dtype: torch.dtype) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in dict.fromkeys(place.path for place in places.values()):
        with safe_open(path, framework="pt") as file:
            for own, place in places.items():
                if place.path == path:
                    weight = file.get_tensor(place.name)
                    # Copied always: a mapped tensor's alignment depends on the file, and results depend on alignment.
                    weights[own] = weight.to(dtype if weight.is_floating_point() else weight.dtype, copy=True)
    return weights


def _refuse_misfit(network: nn.Module, places: Mapping[str, Place], where: str) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    shapes = [
        f"{n} (want {wanted[n]}, have {places[n].shape})"
        for n in wanted
        if n in places and wanted[n] != places[n].shape
    ]
    kinds = {
        "missing": [name for name in wanted if name not in places],
        "unexpected": [place.name for own, place in places.items() if own not in wanted],
        "of another shape": shapes,
    }
    found = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if found:
        what = f"these files do not fit {type(network).__name__}, which has {len(wanted)} weights"
        raise StateError(where, what, *found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:EXAMPLES]) + (", ..." if len(names) > EXAMPLES else "")
