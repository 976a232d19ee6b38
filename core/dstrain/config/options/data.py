"""The options of the dataset: which rows are read, and captions, sizes and views of these."""

from pathlib import Path
from typing import Literal

from dstrain.config.conversion import (
    as_datasets,
    as_optional_path,
    as_paths,
    as_texts,
    converted,
    options,
)
from dstrain.config.fields import option

SamplingMode = Literal["head", "chunk", "uniform"]
OnLongPrompt = Literal["error", "truncate"]


@options
class DataOptions:
    """Which rows a run reads, and how."""

    dataset_base_path: Path | None = converted(
        "data",
        "Dataset: a folder with metadata, with captions beside images or videos, or of a plugin's form; "
        "a file of such a form; or the id of a published dataset, OWNER/NAME[@REVISION][:FOLDER]. Paths in "
        "metadata are relative to the folder. Can be repeated.",
        converter=as_optional_path,
        default=None,
        affects={"dataset"},
        common=True,
    )
    dataset: tuple[str, ...] = converted(
        "data",
        "Another dataset, as JSON: its dataset_base_path, repeats, loss_weight and options that are its own. "
        "Can be repeated; a file of --config has a table [[dataset]] for each.",
        converter=as_datasets,
        default=(),
        affects={"resolved"},
    )
    dataset_metadata_path: Path | None = converted(
        "data",
        "Metadata file (csv, json, jsonl, or of a plugin's form). Defaults to what is in --dataset_base_path.",
        converter=as_optional_path,
        default=None,
        affects={"dataset"},
        common=True,
    )
    column: tuple[str, ...] = converted(
        "data",
        "Column that an input is read from, as INPUT=COLUMN, such as prompt=text. Several are "
        "separated by commas, or the option is repeated.",
        converter=as_texts,
        default=(),
        affects={"resolved", "cache", "if_given", "dataset"},
    )
    default_caption: str | None = option(
        "data: captions",
        "Caption of the images and videos in a folder that have none. Without it, they are refused.",
        affects={"resolved", "cache", "if_given", "dataset"},
    )
    dataset_root: tuple[Path, ...] = converted(
        "data",
        "Additional folder that dataset files may be in. Can be repeated.",
        converter=as_paths,
        default=(),
    )
    dataset_form: str | None = option(
        "data",
        "Form of the datasets: table, folder (images with captions), or the name of a plugin's form. "
        "Defaults to the only one that finds them.",
        affects={"dataset"},
    )
    on_bad_sample: Literal["error", "skip"] = option(
        "data",
        "What to do with unreadable rows: stop with an error, or skip them and write bad_samples.jsonl.",
        "error",
    )
    on_long_prompt: OnLongPrompt = option(
        "data: captions",
        "What to do with prompts longer than the model takes: stop with an error, or cut them and warn.",
        "truncate",
    )
    dataset_repeat: int = option(
        "data",
        "Number of times each row is used per epoch.",
        1,
        affects={"training"},
        minimum=1,
    )
    dataset_num_workers: int = option(
        "data",
        "Number of data loading processes; 0 decodes files in a thread, and reads cached values as they are used.",
        0,
        minimum=0,
    )
    max_pixels: int = option(
        "data: sizes",
        "Without --height and --width, scale larger images down to this many pixels.",
        1048576,
        affects={"training", "cache", "dataset"},
        minimum=1,
    )
    data_file_keys: str | None = option(
        "data",
        "Dataset columns that contain file names, comma-separated. Defaults to the variant's.",
        affects={"resolved", "cache"},
    )
    extra_inputs: str | None = option(
        "data",
        "Additional dataset columns to use as model inputs, comma-separated.",
        affects={"resolved", "cache"},
    )
    mask_column: str | None = option(
        "data: masks",
        "Dataset column of masks: the loss counts an image fully where its mask is white, and by "
        "--unmasked_weight where it is black.",
        affects={"resolved", "cache", "mask", "dataset"},
    )
    alpha_mask: bool = option(
        "data: masks",
        "Use the alpha channel of training images as their masks.",
        False,
        affects={"resolved", "cache", "mask", "dataset"},
    )
    unmasked_weight: float = option(
        "data: masks",
        "How much the loss counts what a mask leaves out, from 0 to below 1.",
        0.0,
        affects={"resolved", "cache", "mask", "dataset"},
        minimum=0,
        below=1,
    )
    num_frames: int | str = option(
        "data: video",
        "Number of video frames per sample; of several, comma-separated, a video gives the most that it has.",
        81,
        listed=True,
        affects={"training", "cache", "video", "dataset"},
        minimum=1,
        common=True,
    )
    fix_frame_rate: bool | None = option(
        "data: video",
        "Resample videos to the model's frame rate, which is the default, rather than take their frames as they are.",
        affects={"training", "cache", "if_given", "video"},
    )
    frame_sampling: SamplingMode = option(
        "data: video",
        "Which samples to take from a video: its first frames, consecutive chunks, or "
        "--frame_samples evenly spaced clips.",
        "head",
        affects={"training", "cache", "video", "dataset"},
    )
    frame_samples: int | None = option(
        "data: video",
        "Number of samples per video with --frame_sampling uniform.",
        affects={"training", "cache", "video", "dataset"},
        minimum=1,
    )
    feature_cache: Path | None = converted(
        "data",
        "Folder of the feature cache: what it lacks is computed first, then training reads it, the encoders freed. "
        "For one stage alone, defaults to --output_path (stage 1) or --dataset_base_path (stage 2).",
        converter=as_optional_path,
        default=None,
        common=True,
    )
    accept_code_change: bool = option(
        "data",
        "Train from a feature cache although the code of units has changed since it was filled.",
        False,
    )


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
