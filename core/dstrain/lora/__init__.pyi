from dstrain.lora.adapters import (
    UP as UP,
    add_layers as add_layers,
    inject as inject,
    lora_layers as lora_layers,
    lora_state as lora_state,
)
from dstrain.lora.foreign.differences import add_differences as add_differences
from dstrain.lora.header import (
    base_weights as base_weights,
    log_differences as log_differences,
)
from dstrain.lora.initial_layers import load_layers as load_layers
from dstrain.lora.key_names import (
    base_shapes as base_shapes,
    format_of_weights as format_of_weights,
    key_formats as key_formats,
    matching_names as matching_names,
    unused_layers as unused_layers,
)
from dstrain.lora.key_parser import is_lora_key as is_lora_key
from dstrain.lora.layers import LoraConfig as LoraConfig, Trainables as Trainables
from dstrain.lora.merging import merge_layers as merge_layers, merged as merged
from dstrain.lora.reader import (
    check_lora_file as check_lora_file,
    read_lora as read_lora,
)
from dstrain.lora.reading.contents import Lora as Lora
from dstrain.lora.reading.groups import groups_in as groups_in
from dstrain.lora.writer import (
    check_names as check_names,
    save_lora_for as save_lora_for,
)
