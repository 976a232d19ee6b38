"""Networks and tokenizers of diffusers and transformers, as components have them."""

import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dstrain.errors import StateError, reading
from dstrain.lazy import import_name
from dstrain.models.components import Files
from dstrain.models.formats import Config, as_tuples
from dstrain.models.network_files import load_network
from dstrain.models.placing import Place, keep


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
        module = "transformers.conversion_mapping"
        get_conversions = import_name(module, "get_model_conversion_mapping")
        network = load_network(partial(self.build, configuration), files, dtype, place)
        # As transformers' own loader does, so that what is saved has the published
        # names; a prefix that the network's own names have was not removed.
        own = list(network.state_dict())
        conversions: Any = [
            one
            for one in get_conversions(network, add_legacy=False)
            if not any(
                name.startswith(f"{getattr(one, 'prefix_to_remove', None)}.")
                for name in own
            )
        ]
        network._weight_conversions = conversions
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
        """Create a toy's tokenizer from arguments of its class, also those of JSON."""
        # Words and merges of a vocabulary must be tuples.
        return _load_class(self.name)(**as_tuples(arguments))


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
