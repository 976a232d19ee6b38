"""Everything that the package of a model family imports, in one place.

`dstrain.plugin.functional` has the tensor functions that families share. Each name
loads on first use, so that a family's record imports no torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrain.errors import InputError as InputError
    from dstrain.graph.inputs import Column as Column
    from dstrain.graph.inputs import Constant as Constant
    from dstrain.graph.inputs import InferenceOnly as InferenceOnly
    from dstrain.graph.inputs import Measured as Measured
    from dstrain.graph.inputs import at_least as at_least
    from dstrain.graph.schedule import FlowMatchSchedule as FlowMatchSchedule
    from dstrain.graph.schedule import LatentConstraint as LatentConstraint
    from dstrain.graph.spec import ExpertSchedule as ExpertSchedule
    from dstrain.graph.spec import PipelineSpec as PipelineSpec
    from dstrain.graph.unit import Unit as Unit
    from dstrain.graph.values import Frames as Frames
    from dstrain.models.components import Component as Component
    from dstrain.models.components import Files as Files
    from dstrain.models.formats import CheckpointFormat as CheckpointFormat
    from dstrain.models.formats import KeyMap as KeyMap
    from dstrain.models.formats import LoraKeyFormat as LoraKeyFormat
    from dstrain.models.formats import Shapes as Shapes
    from dstrain.models.formats import nth_of as nth_of
    from dstrain.models.formats import same_config as same_config
    from dstrain.models.networks import DiffusersNetwork as DiffusersNetwork
    from dstrain.models.networks import Tokenizer as Tokenizer
    from dstrain.models.networks import TransformersNetwork as TransformersNetwork
    from dstrain.models.toy import write_model as write_model
    from dstrain.registry.family import ModelFamily as ModelFamily
    from dstrain.registry.family import Option as Option
    from dstrain.registry.hooks import hookimpl as hookimpl

_MODULES = MappingProxyType(
    {
        "CheckpointFormat": "models.formats",
        "Column": "graph.inputs",
        "Component": "models.components",
        "Constant": "graph.inputs",
        "DiffusersNetwork": "models.networks",
        "ExpertSchedule": "graph.spec",
        "Files": "models.components",
        "FlowMatchSchedule": "graph.schedule",
        "Frames": "graph.values",
        "InferenceOnly": "graph.inputs",
        "InputError": "errors",
        "KeyMap": "models.formats",
        "LatentConstraint": "graph.schedule",
        "LoraKeyFormat": "models.formats",
        "Measured": "graph.inputs",
        "ModelFamily": "registry.family",
        "Option": "registry.family",
        "PipelineSpec": "graph.spec",
        "Shapes": "models.formats",
        "Tokenizer": "models.networks",
        "TransformersNetwork": "models.networks",
        "Unit": "graph.unit",
        "at_least": "graph.inputs",
        "hookimpl": "registry.hooks",
        "nth_of": "models.formats",
        "same_config": "models.formats",
        "write_model": "models.toy",
    }
)
__all__ = tuple(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]

# Hidden from type checkers, so that a misspelt name is an error to them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"dstrain.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
