"""The options of the dataset: which rows are read, and captions, sizes and views of these."""

from pathlib import Path
from typing import Literal

from dstrain.config.conversion import converted, options
from dstrain.config.converters import as_datasets, as_optional_path, as_paths, as_texts
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
        "Samples to take from a video: its first frames, consecutive chunks, or --frame_samples evenly spaced clips.",
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
