from dstrain.config import (
    LoraFile as LoraFile,
    parse_alpha as parse_alpha,
    parse_lora as parse_lora,
)
from dstrain.config.lora_file import Alpha as Alpha
from dstrain.config.options import LoraOptions as LoraOptions
from dstrain.console import number_of as number_of
from dstrain.errors import StateError as StateError
from dstrain.lora.alphas import ADAPTER_HEADER as ADAPTER_HEADER
from dstrain.lora.file_formats import (
    LoraFormat as LoraFormat,
    is_lora_file as is_lora_file,
    read_lora as read_lora,
)
from dstrain.lora.layer_names import (
    KeyTable as KeyTable,
    Prefix as Prefix,
    Rows as Rows,
    base_shapes as base_shapes,
    layers_of as layers_of,
)
from dstrain.lora.layers import (
    Change as Change,
    Layer as Layer,
    LoraLayer as LoraLayer,
    rescaled as rescaled,
)
from dstrain.lora.lora_names import (
    Contents as Contents,
    Group as Group,
    LoraNames as LoraNames,
    LoraSource as LoraSource,
    groups_in as groups_in,
)
from dstrain.lora.lora_reading import read_layers as read_layers
from dstrain.lora.stored import (
    FOLDED as FOLDED,
    Lora as Lora,
    StoredLayer as StoredLayer,
    is_folded as is_folded,
    parse_keys as parse_keys,
)
from dstrain.lora.types import LoraType as LoraType, pair_of as pair_of
from dstrain.lora.writer import (
    in_header as in_header,
    peft_exceptions as peft_exceptions,
)
from dstrain.models import (
    NATIVE as NATIVE,
    Config as Config,
    components_of as components_of,
    empty_component as empty_component,
    recognize as recognize,
    to_checkpoint as to_checkpoint,
)
from dstrain.models.configs import recorded_config as recorded_config
from dstrain.models.formats import (
    checkpoint_shapes as checkpoint_shapes,
    fits as fits,
    from_checkpoint as from_checkpoint,
)
from dstrain.registry import load_family as load_family
from dstrain.storage import (
    CHECKSUM as CHECKSUM,
    read_tensors as read_tensors,
    write_tensors as write_tensors,
)
