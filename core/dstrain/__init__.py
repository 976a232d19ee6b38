"""dstrain: trains diffusion models from the code that runs them.

The public names load on first use, so that `import dstrain` imports no torch.
"""

from importlib import import_module
from typing import Any

_PLACES = (
    ("components", "Component", "Files"),
    ("config", "GenerateConfig", "TrainConfig"),
    ("distill", "DIRECT_DISTILL"),
    ("errors", "DstrainError", "StateError", "UsageError"),
    ("gradient", "gradient_checkpoint_forward"),
    ("model_files", "ModelConfig"),
    ("lora", "LoraSpec"),
    ("losses", "SFT", "Held", "flow_match"),
    ("module", "Batch", "Sample", "TrainingModule"),
    ("pipeline", "Pipeline"),
    ("record", "ModelRecord", "Option"),
    ("runner", "run"),
    ("schedule", "FlowMatchSchedule", "NoiseLevels"),
    ("sources", "Column", "Given", "Setting", "Size"),
    ("tasks", "Task"),
    ("trainables", "Trainables"),
    ("unit", "Signature", "Unit"),
    ("values", "Frames"),
    ("wiring", "Expert", "Wiring"),
)

__all__ = tuple(name for place in _PLACES for name in place[1:])


def __getattr__(name: str) -> Any:
    for module, *names in _PLACES:
        if name in names:
            return getattr(import_module(f"dstrain.{module}"), name)
    raise AttributeError(f"module 'dstrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
