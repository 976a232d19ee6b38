from dstrain.config.options.generate import GenerateConfig as GenerateConfig
from dstrain.config.options.train import TrainConfig as TrainConfig
from dstrain.errors import (
    CacheError as CacheError,
    Diverged as Diverged,
    DstrainError as DstrainError,
    InputError as InputError,
    Interrupted as Interrupted,
    MissingFiles as MissingFiles,
    OutOfMemory as OutOfMemory,
    StateError as StateError,
    SystemFault as SystemFault,
    UsageError as UsageError,
)
from dstrain.generation.run import generate as generate
from dstrain.graph.noise_process import ConstrainLatents as ConstrainLatents
from dstrain.graph.timestep_sampler import TimestepSampler as TimestepSampler
from dstrain.graph.unit import Task as Task
from dstrain.graph.unit_stages import (
    UnitStages as UnitStages,
    split_units as split_units,
)
from dstrain.graph.values import Frames as Frames
from dstrain.lora.layers import LoraConfig as LoraConfig, Trainables as Trainables
from dstrain.lora.writer import save_lora as save_lora
from dstrain.models.component_files import ModelConfig as ModelConfig
from dstrain.models.execution import (
    gradient_checkpoint_forward as gradient_checkpoint_forward,
)
from dstrain.pipeline.generated import Layers as Layers, Video as Video
from dstrain.pipeline.pipeline import Pipeline as Pipeline
from dstrain.randomness import Rng as Rng, SampleKey as SampleKey
from dstrain.runs.runner import run as run
from dstrain.runs.script.parts import (
    Callback as Callback,
    RunResult as RunResult,
    StepNumbers as StepNumbers,
)
from dstrain.runs.script.training_task import (
    launch_training_task as launch_training_task,
)
from dstrain.runs.script.weights_logger import (
    TrainingLogger as TrainingLogger,
    WeightsLogger as WeightsLogger,
)
from dstrain.training.loader import Batch as Batch
from dstrain.training.losses import (
    DIRECT_DISTILL as DIRECT_DISTILL,
    SFT as SFT,
    TRAJECTORY_IMITATION as TRAJECTORY_IMITATION,
    Predict as Predict,
    flow_match as flow_match,
)
from dstrain.training.module import TrainingModule as TrainingModule
from dstrain.training.sample_sources import Sample as Sample
