"""The options of samples are exactly these, and what each of them affects is frozen."""

from dstrain.config.options.samples import SampleOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "bucket_max_side": (None, "cache dataset if_given training"),
    "bucket_min_side": (None, "cache dataset if_given training"),
    "bucket_step": (None, "cache dataset if_given training"),
    "bucket_upscale": (False, "cache dataset if_given training"),
    "caption_dropout": (0.0, "cache captions dataset if_given training"),
    "caption_lines": (False, "cache captions dataset if_given training"),
    "caption_prefix": (None, "cache captions dataset if_given training"),
    "caption_suffix": (None, "cache captions dataset if_given training"),
    "caption_variants": (None, "cache captions dataset if_given training"),
    "crops": (1, "cache dataset if_given training"),
    "flip": (False, "cache dataset if_given training"),
    "keep_tags": (None, "cache captions dataset if_given training"),
    "resolution": (None, "cache dataset if_given training"),
    "shuffle_tags": (False, "cache captions dataset if_given training"),
    "trigger_word": (None, "cache captions dataset if_given training"),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(SampleOptions) == OPTIONS
