"""The options that trade time or precision for memory. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from dstrain.plugin import UsageError, option, options, split_commas

from dstrain_memory.quantization.requests import parse_storage

BOTH = ("train", "generate")


@options
class MemoryOptions:
    """How the weights of a model are kept, and how its networks compute."""

    offload_models: str | None = option(
        "memory",
        "Components to keep in RAM, by name or as the model flags have them, comma-separated; they are "
        "on the device only while a unit or decoder uses them.",
        commands=BOTH,
    )
    fp8_models: str | None = option(
        "memory",
        "Components to quantize to fp8, by name or as the model flags have them, comma-separated; "
        "`--quant_options COMPONENT:int8_block` takes as many bytes and is three times as exact.",
        commands=BOTH,
        affects={"resolved"},
    )
    quant_options: str | None = option(
        "memory",
        "How frozen weights are quantized: COMPONENT:METHOD, with /EXCLUDED,... or @ONLY,... for layers; "
        "several are separated by semicolons. METHOD is fp8, int8_block, bitsandbytes_nf4 or another.",
        commands=BOTH,
        affects={"resolved"},
        common=True,
    )
    tiled: bool = option(
        "memory",
        "Encode and decode with the VAE in tiles that overlap, which takes less memory and changes results a little.",
        False,
        commands=BOTH,
        affects={"resolved"},
    )
    tile_size: int | None = option(
        "memory",
        "Side of a tile in pixels. Defaults to the VAE's own.",
        commands=BOTH,
        affects={"resolved"},
        minimum=1,
    )
    tile_stride: int | None = option(
        "memory",
        "Pixels from one tile to the next. Defaults to the share of --tile_size that is the VAE's own.",
        commands=BOTH,
        affects={"resolved"},
        minimum=1,
    )
    framewise_decoding: bool = option(
        "memory",
        "Encode and decode videos in groups of frames, where the VAE can do either.",
        False,
        commands=BOTH,
        affects={"resolved"},
    )
    blocks_to_swap: int | None = option(
        "memory",
        "Keep the frozen weights of the last N blocks of each trained network, or of the denoiser, in RAM, and on "
        "the device only while they compute (training implies --use_gradient_checkpointing).",
        commands=BOTH,
        minimum=1,
        most_of_toy=1,
        common=True,
    )
    enable_model_cpu_offload: bool = option(
        "memory",
        "Keep the frozen weights of all blocks in RAM, as --blocks_to_swap does for some.",
        False,
        commands=BOTH,
    )
    compile: bool = option(
        "training",
        "Compile the blocks of trained networks with torch.compile: the first steps take longer, the others less time.",
        False,
        affects={"resolved"},
    )

    @property
    def swap_flag(self) -> str:
        """Return the flag that asks for block swap; '' for none."""
        if self.enable_model_cpu_offload:
            return "--enable_model_cpu_offload"
        return "" if self.blocks_to_swap is None else "--blocks_to_swap"

    def check(self, config: Any) -> None:
        """Raise UsageError for values that contradict each other, or other options."""
        parse_storage(self.fp8_models, self.quant_options)
        if self.offload_models is not None and not split_commas(self.offload_models):
            raise UsageError("--offload_models", "is empty")
        self._check_tiles()
        if self.blocks_to_swap is not None and self.enable_model_cpu_offload:
            what = "has no effect with --enable_model_cpu_offload, which swaps all"
            raise UsageError("--blocks_to_swap", what)
        switched = getattr(config, "use_gradient_checkpointing", None)
        if self.swap_flag and switched is False:
            what = "cannot be combined with swapped blocks, which needs gradient checkpointing"
            raise UsageError("--no_use_gradient_checkpointing", what)

    def of_run(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a run recorded, where these options do not say otherwise."""
        names = []
        # Either may say how a component is stored that the run's other one stores.
        if self.fp8_models is None and self.quant_options is None:
            names += ["fp8_models", "quant_options"]
        if not self.tiled and not self.framewise_decoding:
            names += ["tiled", "framewise_decoding"]
            if self.tile_size is None and self.tile_stride is None:
                names += ["tile_size", "tile_stride"]
        return {name: recorded[name] for name in names if name in recorded}

    def _check_tiles(self) -> None:
        size, stride = self.tile_size, self.tile_stride
        for name, value in (("tile_size", size), ("tile_stride", stride)):
            if value is not None and not self.tiled:
                raise UsageError(f"--{name}", "has no effect without --tiled")
        if size is not None and stride is not None and stride > size:
            what = f"is {stride}, more than --tile_size {size}"
            raise UsageError("--tile_stride", what, "between the tiles would be gaps")
