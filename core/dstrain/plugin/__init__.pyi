from dstrain.config.conversion import converted as converted, options as options
from dstrain.config.fields import option as option
from dstrain.config.options import (
    GenerateConfig as GenerateConfig,
    TrainConfig as TrainConfig,
)
from dstrain.console import shell_word as shell_word
from dstrain.data.forms.form import (
    Content as Content,
    Form as Form,
    FormCell as FormCell,
    FormRow as FormRow,
    Given as Given,
    Source as Source,
)
from dstrain.errors import (
    InputError as InputError,
    UsageError as UsageError,
    first_few as first_few,
)
from dstrain.graph.inputs import (
    Column as Column,
    Constant as Constant,
    EntryCount as EntryCount,
    InferenceOnly as InferenceOnly,
    Measured as Measured,
    at_least as at_least,
    between as between,
    one_of as one_of,
)
from dstrain.graph.noise_schedule import (
    FlowMatchSchedule as FlowMatchSchedule,
    LatentConstraint as LatentConstraint,
)
from dstrain.graph.quantization import QuantizationMethod as QuantizationMethod
from dstrain.graph.spec import (
    ExpertSchedule as ExpertSchedule,
    PipelineSpec as PipelineSpec,
)
from dstrain.graph.task import Task as Task
from dstrain.graph.unit import versioned as versioned
from dstrain.graph.values import PLAIN_TENSORS as PLAIN_TENSORS, Frames as Frames
from dstrain.models.components import Component as Component, Files as Files
from dstrain.models.formats import (
    CheckpointFormat as CheckpointFormat,
    KeyMap as KeyMap,
    LoraKeyFormat as LoraKeyFormat,
    Shapes as Shapes,
    read_key_maps as read_key_maps,
    same_config as same_config,
)
from dstrain.models.hub import fetch_dataset as fetch_dataset
from dstrain.models.networks import (
    DiffusersNetwork as DiffusersNetwork,
    Tokenizer as Tokenizer,
    TransformersNetwork as TransformersNetwork,
)
from dstrain.models.quantization.methods import stored_linear as stored_linear
from dstrain.models.toy import toy_writer as toy_writer
from dstrain.registry.family import ModelFamily as ModelFamily, Option as Option
from dstrain.registry.hooks import Section as Section, hookimpl as hookimpl
from dstrain.runs.datasets.largest import LargestSample as LargestSample
from dstrain.runs.dry_run.components import (
    KeptWeights as KeptWeights,
    PlannedComponent as PlannedComponent,
)
from dstrain.runs.dry_run.planned_run import (
    CachedRows as CachedRows,
    PlannedRun as PlannedRun,
)
from dstrain.runs.observers import Observer as Observer, WatchedRun as WatchedRun
from dstrain.storage import read_limited as read_limited
from dstrain.training.updater import Updater as Updater
