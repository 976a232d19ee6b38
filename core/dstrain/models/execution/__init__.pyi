from dstrain.models.execution.blocks import repeated_blocks as repeated_blocks
from dstrain.models.execution.gradient_checkpointing import (
    checkpoint_through as checkpoint_through,
    enable_checkpointing as enable_checkpointing,
)
from dstrain.models.execution.stored import StoredLinear as StoredLinear
