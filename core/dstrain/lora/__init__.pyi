from dstrain.lora.adapters import (
    add_layers as add_layers,
    inject as inject,
    load_layers as load_layers,
    lora_layers as lora_layers,
    lora_state as lora_state,
)
from dstrain.lora.file_formats import (
    LoraFormat as LoraFormat,
    check_lora_file as check_lora_file,
    components_in as components_in,
    format_named as format_named,
    formats_where as formats_where,
    is_lora_file as is_lora_file,
    known_formats as known_formats,
    read_lora as read_lora,
)
from dstrain.lora.layer_names import (
    base_shapes as base_shapes,
    matching_names as matching_names,
    unused_layers as unused_layers,
)
from dstrain.lora.layers import LoraConfig as LoraConfig, Trainables as Trainables
from dstrain.lora.merging import merge as merge
from dstrain.lora.stored import Lora as Lora
from dstrain.lora.types import type_named as type_named
from dstrain.lora.writer import (
    base_weights as base_weights,
    check_names as check_names,
    log_differences as log_differences,
    save_lora_for as save_lora_for,
)
