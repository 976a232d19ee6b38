from dstrain.config.options import GenerateConfig as GenerateConfig
from dstrain.config.options import TrainConfig as TrainConfig
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
from dstrain.models.component_files import ModelConfig as ModelConfig
from dstrain.models.gradient_checkpointing import (
    gradient_checkpoint_forward as gradient_checkpoint_forward,
)
from dstrain.pipeline.pipeline import Pipeline as Pipeline
from dstrain.randomness import SampleKey as SampleKey
from dstrain.runs.runner import run as run
from dstrain.training.distill import DIRECT_DISTILL as DIRECT_DISTILL
from dstrain.training.loader import Sample as Sample
from dstrain.training.losses import SFT as SFT
from dstrain.training.losses import flow_match as flow_match
from dstrain.training.module import TrainingModule as TrainingModule
