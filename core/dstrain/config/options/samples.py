"""The options of what a row gives: captions, sizes and views of its images."""

from dstrain.config.fields import option
from dstrain.config.given import options


@options
class SampleOptions:
    """How rows become samples, and what of them each draw takes."""

    resolution: str | None = option(
        "data",
        "Side of a square whose area images and videos are scaled to, in buckets of similar aspect ratio; "
        "several, comma-separated, give a sample of each row at each.",
        affects={"training", "cache", "if_given", "dataset"},
    )
    bucket_step: int | None = option(
        "data",
        "Sides of buckets are multiples of this many pixels. Defaults to a sixteenth of --resolution.",
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
    )
    bucket_min_side: int | None = option(
        "data",
        "Least side of a bucket in pixels. Defaults to half of --resolution.",
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
    )
    bucket_max_side: int | None = option(
        "data",
        "Greatest side of a bucket in pixels. Defaults to twice --resolution.",
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
    )
    bucket_upscale: bool = option(
        "data",
        "Scale images up that are smaller than their bucket; without it they get a smaller one.",
        False,
        affects={"training", "cache", "if_given", "dataset"},
    )
    flip: bool = option(
        "data",
        "Show each image or video mirrored left to right in half of the draws.",
        False,
        affects={"training", "cache", "if_given", "dataset"},
    )
    crops: int = option(
        "data",
        "Number of places at which images are cropped, evenly spaced; each draw takes one. 1 is the centre.",
        1,
        affects={"training", "cache", "if_given", "dataset"},
        minimum=1,
        maximum=64,
    )
    caption_dropout: float = option(
        "data",
        "Probability of an empty caption in place of a sample's own, which makes guidance work.",
        0.0,
        affects={"training", "cache", "if_given", "captions", "dataset"},
        minimum=0,
        below=1,
    )
    caption_lines: bool = option(
        "data",
        "Take each line of a caption as a caption of its own; each draw takes one.",
        False,
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
    shuffle_tags: bool = option(
        "data",
        "Shuffle the comma-separated tags of captions.",
        False,
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
    keep_tags: int | None = option(
        "data",
        "Number of tags at the start of a caption that --shuffle_tags leaves in place.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
        minimum=0,
    )
    caption_variants: int | None = option(
        "data",
        "Number of orders of the tags that --shuffle_tags takes turns with, the written one included. Defaults to 8.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
        minimum=2,
        maximum=1000,
    )
    trigger_word: str | None = option(
        "data",
        "Put in place of [trigger] in captions, or before captions that have neither.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
    caption_prefix: str | None = option(
        "data",
        "Text put before each caption, as it is.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
    caption_suffix: str | None = option(
        "data",
        "Text put after each caption, as it is.",
        affects={"training", "cache", "if_given", "captions", "dataset"},
    )
