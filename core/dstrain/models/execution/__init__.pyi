from dstrain.models.execution.blocks import repeated_blocks as repeated_blocks
from dstrain.models.execution.compilation import compile_blocks as compile_blocks
from dstrain.models.execution.gradient_checkpointing import (
    checkpoint_through as checkpoint_through,
    enable_checkpointing as enable_checkpointing,
)
from dstrain.models.execution.kept import (
    ALL_BLOCKS as ALL_BLOCKS,
    AS_LOADED as AS_LOADED,
    Kept as Kept,
    StoredLayers as StoredLayers,
    described as described,
    last_blocks as last_blocks,
    matches as matches,
)
from dstrain.models.execution.ram import (
    ComponentInRam as ComponentInRam,
    WeightsInRam as WeightsInRam,
    move_others as move_others,
    stored_tensors as stored_tensors,
)
from dstrain.models.execution.tiles import Tiles as Tiles
