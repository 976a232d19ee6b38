"""dstrain: trains diffusion models from the code that runs them.

These are the names for users' scripts; those for authors of a family are in
`dstrain.plugin`. Each loads on first use, so that `import dstrain` imports no torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrain.config.schema import GenerateConfig as GenerateConfig
    from dstrain.config.schema import TrainConfig as TrainConfig
    from dstrain.errors import Diverged as Diverged
    from dstrain.errors import DstrainError as DstrainError
    from dstrain.errors import InputError as InputError
    from dstrain.errors import Interrupted as Interrupted
    from dstrain.errors import OutOfMemory as OutOfMemory
    from dstrain.errors import StateError as StateError
    from dstrain.errors import SystemFault as SystemFault
    from dstrain.errors import UsageError as UsageError
    from dstrain.generation.run import generate as generate
    from dstrain.graph.task import Task as Task
    from dstrain.lora.layers import LoraConfig as LoraConfig
    from dstrain.lora.layers import Trainables as Trainables
    from dstrain.lora.layers import save_lora as save_lora
    from dstrain.models.checkpointing import (
        gradient_checkpoint_forward as gradient_checkpoint_forward,
    )
    from dstrain.models.locate import ModelConfig as ModelConfig
    from dstrain.pipeline.pipeline import Pipeline as Pipeline
    from dstrain.randomness import SampleKey as SampleKey
    from dstrain.runs.runner import run as run
    from dstrain.training.batch import Sample as Sample
    from dstrain.training.distill import DIRECT_DISTILL as DIRECT_DISTILL
    from dstrain.training.losses import SFT as SFT
    from dstrain.training.losses import flow_match as flow_match
    from dstrain.training.module import TrainingModule as TrainingModule

_MODULES = MappingProxyType(
    {
        "DIRECT_DISTILL": "training.distill",
        "Diverged": "errors",
        "DstrainError": "errors",
        "GenerateConfig": "config.schema",
        "InputError": "errors",
        "Interrupted": "errors",
        "LoraConfig": "lora.layers",
        "ModelConfig": "models.locate",
        "OutOfMemory": "errors",
        "Pipeline": "pipeline.pipeline",
        "SFT": "training.losses",
        "Sample": "training.batch",
        "SampleKey": "randomness",
        "StateError": "errors",
        "SystemFault": "errors",
        "Task": "graph.task",
        "TrainConfig": "config.schema",
        "Trainables": "lora.layers",
        "TrainingModule": "training.module",
        "UsageError": "errors",
        "flow_match": "training.losses",
        "generate": "generation.run",
        "gradient_checkpoint_forward": "models.checkpointing",
        "run": "runs.runner",
        "save_lora": "lora.layers",
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
