"""dstrain: trains diffusion models from the code that runs them.

The public names load on first use, so that `import dstrain` imports no torch.
"""

from importlib import import_module
from typing import Any

_PLACES = (
    ("models.components", "Component", "Files"),
    ("config.schema", "GenerateConfig", "TrainConfig"),
    ("training.distill", "DIRECT_DISTILL"),
    ("errors", "DstrainError", "StateError", "UsageError"),
    ("models.checkpointing", "gradient_checkpoint_forward"),
    ("models.locate", "ModelConfig"),
    ("lora.layers", "LoraConfig", "Trainables"),
    ("training.losses", "SFT", "flow_match"),
    ("training.batch", "Batch", "Sample"),
    ("training.module", "TrainingModule"),
    ("pipeline.pipeline", "Pipeline"),
    ("registry.family", "ModelFamily", "Option"),
    ("runs.runner", "run"),
    ("graph.schedule", "FlowMatchSchedule", "LatentConstraint", "TimestepSampler"),
    ("graph.inputs", "Column", "InferenceOnly", "Constant", "Measured"),
    ("graph.task", "Task"),
    ("graph.unit", "FunctionSpec", "Unit"),
    ("graph.values", "Frames"),
    ("graph.spec", "ExpertSchedule", "PipelineSpec"),
)
__all__ = tuple(name for place in _PLACES for name in place[1:])


def __getattr__(name: str) -> Any:
    for module, *names in _PLACES:
        if name in names:
            return getattr(import_module(f"dstrain.{module}"), name)
    raise AttributeError(f"module 'dstrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
