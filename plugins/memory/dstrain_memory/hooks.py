"""What this package adds to `dstrain`: keepers."""

from collections.abc import Sequence

from dstrain.plugin import Keeper, KeeperRequest, hookimpl

from dstrain_memory.options import MemoryOptions

api = 2


@hookimpl
def dstrain_keepers(request: KeeperRequest) -> Sequence[Keeper]:
    """Return what the options ask for."""
    # They import torch.
    from dstrain_memory.compilation import compiling
    from dstrain_memory.moving import moving
    from dstrain_memory.quantization.keeper import quantizing
    from dstrain_memory.tiling import tiling

    options = request.options.of(MemoryOptions)
    return [
        keeper
        for ask in (tiling, moving, quantizing, compiling)
        for keeper in ask(request, options)
    ]
