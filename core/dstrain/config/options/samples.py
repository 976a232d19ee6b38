"""The options of how rows become samples: sizes, views and captions."""

from dstrain.config.conversion import options
from dstrain.config.fields import option


@options
class SampleOptions:
    """How rows become samples, and what of them each draw takes."""

    resolution: str | None = option(
        "data: sizes",
        "Side of a square whose area images and videos are scaled to, in buckets of similar aspect ratio; "
        "several, comma-separated, give a sample of each row at each.",
        affects={"training", "cache", "if_given", "dataset"},
        common=True,
    )
    bucket_step: int | None = option(
        "data: sizes",
        "Sides of buckets are multiples of this many pixels. Defaults to a sixteenth of --resolution.",
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
    )
    bucket_min_side: int | None = option(
        "data: sizes",
        "Least side of a bucket in pixels. Defaults to half of --resolution.",
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
    )
    bucket_max_side: int | None = option(
        "data: sizes",
        "Greatest side of a bucket in pixels. Defaults to twice --resolution.",
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
    )
    bucket_upscale: bool = option(
        "data: sizes",
        "Scale images up that are smaller than their bucket; without it they get a smaller one.",
        False,
        affects={"training", "cache", "if_given", "dataset"},
    )
    flip: bool = option(
        "data: sizes",
        "Show each image or video mirrored left to right in half of the draws.",
        False,
        affects={"training", "cache", "if_given", "dataset"},
    )
    crops: int = option(
        "data: sizes",
        "Number of places at which images are cropped, evenly spaced; each draw takes one. 1 is the centre.",
        1,
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
        maximum=64,
    )
    caption_dropout: float = option(
        "data: captions",
        "Probability of an empty caption in place of a sample's own, which makes guidance work.",
        0.0,
        affects={"training", "cache", "if_given", "captions", "dataset"},
        minimum=0,
        below=1,
    )
    caption_lines: bool = option(
        "data: captions",
        "Take each line of a caption as a caption of its own; each draw takes one.",
        False,
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
    shuffle_tags: bool = option(
        "data: captions",
        "Shuffle the comma-separated tags of captions.",
        False,
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
    keep_tags: int | None = option(
        "data: captions",
        "Number of tags at the start of a caption that --shuffle_tags leaves in place.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
        minimum=0,
    )
    caption_variants: int | None = option(
        "data: captions",
        "Number of orders of the tags that --shuffle_tags takes turns with, the written one included. Defaults to 8.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
        minimum=2,
        maximum=1000,
    )
    trigger_word: str | None = option(
        "data: captions",
        "Put in place of [trigger] in captions, or before captions that have neither.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
        common=True,
    )
    caption_prefix: str | None = option(
        "data: captions",
        "Text put before each caption, as it is.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
    caption_suffix: str | None = option(
        "data: captions",
        "Text put after each caption, as it is.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
