from dstrain.config.options.data import (
    OnLongPrompt as OnLongPrompt,
    SamplingMode as SamplingMode,
)
from dstrain.config.options.generate import GenerateConfig as GenerateConfig
from dstrain.config.options.lora import (
    DEFAULT_RANK as DEFAULT_RANK,
    LoraOptions as LoraOptions,
)
from dstrain.config.options.model import (
    Hub as Hub,
    ModelChoice as ModelChoice,
    Precision as Precision,
)
from dstrain.config.options.optimizer import (
    POLYNOMIAL_END as POLYNOMIAL_END,
    OptimizerOptions as OptimizerOptions,
    ends_at_last_step as ends_at_last_step,
)
from dstrain.config.options.train import (
    TrainConfig as TrainConfig,
    options_affecting as options_affecting,
    recorded_values as recorded_values,
)
