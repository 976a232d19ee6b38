from dstrain.generation.inputs import (
    SAMPLING as SAMPLING,
    data_config as data_config,
    flag_for as flag_for,
    flag_values as flag_values,
    input_names as input_names,
    input_texts as input_texts,
    notice as notice,
    parse_arguments as parse_arguments,
)
from dstrain.generation.pipeline_source import (
    PipelineSource as PipelineSource,
    check_used as check_used,
    open_source as open_source,
)
from dstrain.generation.shown_plan import ShownPlan as ShownPlan
