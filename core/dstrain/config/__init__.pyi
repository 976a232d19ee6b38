from dstrain.config.datasets import (
    dataset_flags as dataset_flags,
    datasets_of as datasets_of,
)
from dstrain.config.fields import Effect as Effect, Flag as Flag
from dstrain.config.lora_file import (
    LoraFile as LoraFile,
    parse_alpha as parse_alpha,
    parse_lora as parse_lora,
)
from dstrain.config.numbers import (
    LearningRates as LearningRates,
    as_size as as_size,
    parse_learning_rates as parse_learning_rates,
)
from dstrain.config.plugin_options import (
    flags as flags,
    flags_by_name as flags_by_name,
    headings as headings,
)
from dstrain.config.serialize import (
    CONFIG as CONFIG,
    as_flags as as_flags,
    command_line as command_line,
    read_resolved as read_resolved,
    with_run_options as with_run_options,
    write_resolved as write_resolved,
)
from dstrain.config.validation import validate as validate
from dstrain.config.value_syntax import (
    NamedInput as NamedInput,
    parse_input as parse_input,
    parse_model_paths as parse_model_paths,
    parse_origins as parse_origins,
    split_commas as split_commas,
)
