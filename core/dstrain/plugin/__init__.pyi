from dstrain.cli.click_options import FilePath as FilePath, command as command
from dstrain.cli.completion import families as families
from dstrain.config.conversion import converted as converted, options as options
from dstrain.config.converters import as_texts as as_texts
from dstrain.config.fields import option as option
from dstrain.config.options import (
    GenerateConfig as GenerateConfig,
    TrainConfig as TrainConfig,
)
from dstrain.config.serialize import read_resolved as read_resolved
from dstrain.config.value_syntax import split_commas as split_commas
from dstrain.console import (
    get_logger as get_logger,
    progress_bar as progress_bar,
    redacted as redacted,
    shell_word as shell_word,
)
from dstrain.data.output import save_image_or_video as save_image_or_video
from dstrain.data.tables.form import (
    Content as Content,
    Form as Form,
    FormCell as FormCell,
    FormRow as FormRow,
    Given as Given,
    Source as Source,
)
from dstrain.errors import (
    DstrainError as DstrainError,
    InputError as InputError,
    UsageError as UsageError,
    first_few as first_few,
    nearest as nearest,
)
from dstrain.graph.function_spec import versioned as versioned
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
from dstrain.graph.keeper import (
    Identity as Identity,
    Keeper as Keeper,
    KeeperRequest as KeeperRequest,
    KeptBytes as KeptBytes,
    WeightSize as WeightSize,
)
from dstrain.graph.noise_process import (
    FlowMatchSchedule as FlowMatchSchedule,
    LatentConstraint as LatentConstraint,
)
from dstrain.graph.spec import (
    ExpertSchedule as ExpertSchedule,
    PipelineSpec as PipelineSpec,
)
from dstrain.graph.unit import Task as Task
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
from dstrain.models.toy import toy_writer as toy_writer
from dstrain.pipeline.planned_weights import (
    KeptWeights as KeptWeights,
    PlannedComponent as PlannedComponent,
)
from dstrain.registry.family import ModelFamily as ModelFamily, Option as Option
from dstrain.registry.hooks import (
    Defaults as Defaults,
    PromptRow as PromptRow,
    Section as Section,
    hookimpl as hookimpl,
)
from dstrain.runs.datasets.sizes import LargestSample as LargestSample
from dstrain.runs.dry_run.planned_run import (
    CachedRows as CachedRows,
    PlannedRun as PlannedRun,
)
from dstrain.runs.prompt_images import Images as Images
from dstrain.runs.watched_run import Observer as Observer, WatchedRun as WatchedRun
from dstrain.storage import read_limited as read_limited
from dstrain.storage.files import write_json as write_json
from dstrain.storage.run_files import RunFiles as RunFiles
from dstrain.storage.temporaries import remove_leftovers as remove_leftovers
from dstrain.training.updater import Updater as Updater
