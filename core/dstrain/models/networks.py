"""Networks: built without allocating memory, then filled from files, strictly in both
directions.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dstrain.errors import StateError, first_few, reading
from dstrain.lazy import import_name
from dstrain.models.components import Component, Files
from dstrain.models.formats import NATIVE, Config, Shapes, as_tuples, fits, shapes_of
from dstrain.models.weights import Weights

Place = Callable[[nn.Module, str, Tensor], Tensor]
"""(network, name of one of its weights, that weight on the CPU) -> the parameter or
buffer to keep in the network, on its device.

It is called for each weight as it is read, before the next one is: what it does not keep
is freed. It may also replace the layer that the weight belongs to.
"""


class OwnRows(Protocol):
    """The rows of a network's weights that a process has."""

    def keep_rows(self, network: nn.Module, name: str, stored: Tensor) -> Tensor:
        """Return what is put in the network for a weight."""


def keep(network: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Place a weight on the CPU, as it was read."""
    return weight


@dataclass(frozen=True)
class DiffusersNetwork:
    """A network whose constructor takes the entries of its `config.json` as arguments.

    The class is imported when it is first used, so that a table of networks costs
    nothing.
    """

    name: str
    """A class of diffusers, or "package.module:Class" of a network of the same kind."""

    @property
    def network_class(self) -> Any:
        """Return its class, which is imported."""
        return _load_class(self.name, "diffusers")

    def accepts_config(self, data: Config) -> bool:
        """Return whether the content of a `config.json` can be this network's: it names
        no other class, nor one of transformers.
        """
        name = self.name.rpartition(":")[2]
        return data.get("_class_name", name) == name and "architectures" not in data

    def configure(self, data: Config) -> SimpleNamespace:
        """Return the content of `config.json` as attributes, defaults filled in, equal
        to the built module's `config`.

        Entries that the constructor does not take (version marks, retired ones) are
        left out.
        """
        configuration = {}
        for parameter in _parameters_of(self.network_class):
            value = data.get(parameter.name, parameter.default)
            if parameter.name != "self" and value is not inspect.Parameter.empty:
                configuration[parameter.name] = value
        return SimpleNamespace(**configuration)

    def load(
        self, files: Files, configuration: Any, dtype: torch.dtype, place: Place = keep
    ) -> nn.Module:
        """Build the network for a configuration from `configure` and fill it; raises
        what `load_network` raises.
        """
        return load_network(partial(self.build, configuration), files, dtype, place)

    def build(self, configuration: Any) -> nn.Module:
        """Build the network for a configuration from `configure`, its weights random."""
        network: nn.Module = self.network_class(**vars(configuration))
        return network


@dataclass(frozen=True)
class TransformersNetwork:
    """A network of transformers, whose constructor takes a configuration record."""

    model: str
    """The name of its class."""
    config: str
    """The name of the record's class."""

    def accepts_config(self, data: Config) -> bool:
        """Return whether the content of a `config.json` can be this network's: it names
        its class, or no other type, and no class of diffusers.
        """
        if "_class_name" in data:
            return False
        # Asked first, because importing the record's class takes half a second.
        if "model_type" not in data or self.model in (data.get("architectures") or ()):
            return True
        return bool(data["model_type"] == _load_class(self.config).model_type)

    def configure(self, data: Config) -> Any:
        """Return the content of `config.json` as the configuration record."""
        # A copy, because some records keep and change what they are given.
        return _load_class(self.config).from_dict(deepcopy(dict(data)))

    def load(
        self, files: Files, configuration: Any, dtype: torch.dtype, place: Place = keep
    ) -> nn.Module:
        """Build the network and fill it; raises what `load_network` raises."""
        get_conversions = import_name(
            "transformers.conversion_mapping", "get_model_conversion_mapping"
        )
        network = load_network(partial(self.build, configuration), files, dtype, place)
        # As transformers' own loader does, so that what is saved has the published
        # names.
        network._weight_conversions = get_conversions(network, add_legacy=False)
        return network

    def build(self, configuration: Any) -> nn.Module:
        """Build the network for a configuration record, its weights random."""
        # A copy, because some constructors change their configuration.
        network: nn.Module = _load_class(self.model)(deepcopy(configuration))
        return network


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of transformers; it has neither configuration nor dtype."""

    name: str
    """A class of transformers, or "package.module:Class" of one with the same
    `from_pretrained`, such as a processor."""

    def load(self, files: Files, configuration: Any, dtype: torch.dtype) -> Any:
        """Load the tokenizer from its folder."""
        folder = files.folder
        load = _load_class(self.name).from_pretrained
        try:
            with reading(folder):
                return load(folder, local_files_only=True)
        except StateError as error:
            # The library does not say which of its files is damaged.
            for path in sorted(folder.glob("*.json")):
                with reading(path):
                    if not isinstance(json.loads(path.read_bytes()), dict):
                        raise StateError(path, "is no JSON object") from error
            raise

    def create(self, arguments: Mapping[str, Any]) -> Any:
        """Create a toy's tokenizer from the arguments of its class, which may be those
        of a JSON file.
        """
        # Words and merges of a vocabulary must be tuples.
        return _load_class(self.name)(**as_tuples(arguments))


def empty_network(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose weights have shapes and take no memory."""
    # Slow to import, and planning needs this module but no weights.
    from accelerate import init_empty_weights

    # Buffers are computed by the constructor and are not in the files, so they must be
    # real.
    with init_empty_weights(include_buffers=False):
        return build()


def empty_component(component: Component, config: Config) -> nn.Module | None:
    """Build the network of a component, as `empty_network` does, for the content of a
    config.json; return None if it cannot be built without files.
    """
    build: Any = getattr(component.network, "build", None)
    if build is None:
        return None
    with reading(f"config.json of {component.name}"):
        return empty_network(partial(build, component.configure(config)))


def load_network(
    build: Callable[[], nn.Module],
    files: Files,
    dtype: torch.dtype,
    place: Place = keep,
) -> nn.Module:
    """Build a network and fill it from its files, weight by weight; it is in eval mode.

    Weights that a network of transformers declares to be tied may be in the files once.
    Raises StateError, before any weight is read, when keys or shapes of files and
    network differ. Buffers that no file has stay on the CPU. `dtype` is that of all
    floating-point weights as they are read.
    """
    with reading(files.folder / "config.json"):
        network = empty_network(build)
    weights = check_files(network, files)
    wanted = shapes_of(network.state_dict())
    for name, weight in weights.read(wanted, dtype):
        put(network, name, place(network, name, weight))
        del weight  # else it would live until the next one is read
    if tied_names(network):
        network.tie_weights(missing_keys=set())  # type: ignore[operator]  # of transformers: those whose values are equal
    return network.eval()


def place_weights(network: nn.Module, place: Place) -> None:
    """Place the weights of a network that were not placed as they were read."""
    placed: dict[int, Tensor] = {}
    for name, weight in network.state_dict(keep_vars=True).items():
        if id(weight) not in placed:
            put(network, name, place(network, name, weight.detach()))
            own = network.get_submodule(name.rpartition(".")[0])
            placed[id(weight)] = getattr(own, name.rpartition(".")[2])
        else:
            put(network, name, placed[id(weight)])


def put(network: nn.Module, name: str, weight: Tensor) -> None:
    """Make a tensor the parameter or the saved buffer of this name, frozen.

    Raises AttributeError if the network has none.
    """
    parent, _, own = name.rpartition(".")
    module = network.get_submodule(parent)
    if own in module._buffers:
        module._buffers[own] = weight
        return
    if own not in module._parameters:
        raise AttributeError(f"{type(network).__name__} has no weight {name}")
    if not isinstance(weight, nn.Parameter):
        weight = nn.Parameter(weight, requires_grad=False)
    module._parameters[own] = weight


def tied_names(network: nn.Module) -> frozenset[str]:
    """Return the weights that a network of transformers declares to be tied to others,
    and those others.
    """
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    return frozenset((*tied, *tied.values()))


def place_buffers(network: nn.Module, device: torch.device) -> None:
    """Move the buffers that no file has, which the constructor computed, to a device."""
    for module in network.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def set_dtype(network: nn.Module, dtype: torch.dtype) -> None:
    """Give the weights of a network without memory the dtype that loading gives them."""
    for weight in network.state_dict(keep_vars=True).values():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def check_files(network: nn.Module, files: Files) -> Weights:
    """Return a network's weights in its files, not read yet, each of tied ones present.

    Raises StateError when keys or shapes of files and network differ.
    """
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    weights = Weights.of(files)
    parts = dict(weights.parts)
    for one, other in tied.items():
        if other in parts:
            parts.setdefault(one, parts[other])
        elif one in parts:
            parts[other] = parts[one]
    weights = replace(weights, parts=parts)
    wanted = shapes_of(network.state_dict())
    _check_fit(wanted, weights, files, type(network).__name__)
    return weights


def _check_fit(wanted: Shapes, weights: Weights, files: Files, network: str) -> None:
    """Raise StateError with examples, in the files' keys, of what is missing,
    unexpected or of a different shape.
    """
    checkpoint_format = files.checkpoint_format
    have = weights.shapes
    exact = checkpoint_format is NATIVE
    used: set[str] = set()
    missing: list[str] = []
    misshapen: list[str] = []
    for ours, shape in wanted.items():
        if ours not in have:
            name = files.prefix + checkpoint_format.original(ours)
            if name not in missing:  # as several weights are parts of one in the files
                missing.append(name)
            continue
        used.update(part.name for part in weights.parts[ours])
        if have[ours] != shape and (exact or not fits(have[ours], shape)):
            parts = weights.parts[ours]
            theirs = " + ".join(files.prefix + part.name for part in parts)
            misshapen.append(f"{theirs} (expected {shape}, found {have[ours]})")
    unexpected = [
        tensor.name
        for name, tensor in weights.tensors.items()
        if name not in used and not checkpoint_format.ignores(name)
    ]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of a different shape": misshapen,
    }
    found = ((kind, names) for kind, names in problems.items() if names)
    lines = [f"{len(names)} {kind}: {first_few(names)}" for kind, names in found]
    if lines:
        what = f"these files do not fit {network}, which has {len(wanted)} weights"
        raise StateError(files.folder, what, *lines)


def _parameters_of(network_class: type) -> list[inspect.Parameter]:
    """Return the parameters of a constructor, and of the one of the class above where it
    passes others on to that.
    """
    found: list[inspect.Parameter] = []
    for one in network_class.__mro__:
        if "__init__" not in vars(one):
            continue
        own = list(inspect.signature(vars(one)["__init__"]).parameters.values())
        others = [one for one in own if one.kind is inspect.Parameter.VAR_KEYWORD]
        found += [one for one in own if one not in others]
        if not others:
            break
    return found


def _load_class(name: str, library: str = "transformers") -> Any:
    """Import a class of a library, or "package.module:Class"."""
    module, _, attribute = name.rpartition(":")
    return import_name(module or library, attribute)
