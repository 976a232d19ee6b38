from dstrain.data.cells import file_names as file_names
from dstrain.data.files import spellings as spellings
from dstrain.data.row_checks import check_rows as check_rows
from dstrain.data.tables.metadata import read_metadata as read_metadata
from dstrain.generation.inputs import (
    SAMPLING as SAMPLING,
    data_config as data_config,
    flag_for as flag_for,
    flag_values as flag_values,
    input_names as input_names,
    input_texts as input_texts,
    noticing as noticing,
    parse_arguments as parse_arguments,
)
from dstrain.generation.pipeline_source import (
    PipelineSource as PipelineSource,
    check_used as check_used,
    open_source as open_source,
)
from dstrain.generation.shown_plan import ShownPlan as ShownPlan
from dstrain.graph.inputs import as_column as as_column
from dstrain.pipeline.inference_plan import plan_inference as plan_inference
from dstrain.pipeline.sampler import (
    inference_sigmas as inference_sigmas,
    seeded_noise as seeded_noise,
)
from dstrain.storage.file_digests import Digests as Digests
from dstrain.storage.hashing import hash_json as hash_json
from dstrain.training.losses import LATENTS as LATENTS, SIGMAS as SIGMAS
from dstrain.training.memory import oom_as_error as oom_as_error
