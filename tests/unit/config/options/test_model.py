"""The options of model are exactly these, and what each of them affects is frozen."""

from dstrain.config.options import ModelChoice

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "fp8_models": (None, "resolved"),
    "framewise_decoding": (False, "resolved"),
    "height": (None, "cache dataset training"),
    "hub": (None, ""),
    "mixed_precision": (None, "resolved"),
    "model": (None, "training"),
    "model_id": (None, ""),
    "model_id_with_origin_paths": (None, ""),
    "model_paths": (None, ""),
    "offload_models": (None, ""),
    "quant_options": (None, "resolved"),
    "seed": (0, "training"),
    "tile_size": (None, "resolved"),
    "tile_stride": (None, "resolved"),
    "tiled": (False, "resolved"),
    "toy": (False, ""),
    "variant": (None, "resolved"),
    "width": (None, "cache dataset training"),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(ModelChoice) == OPTIONS
