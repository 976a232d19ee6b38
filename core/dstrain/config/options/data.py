"""The options of the dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dstrain.config.fields import option

SamplingMode = Literal["head", "chunk", "uniform"]
OnLongPrompt = Literal["error", "truncate"]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which rows a run reads, and how."""

    dataset_base_path: Path | None = option(
        "data",
        "Dataset folder; paths in the metadata are relative to it.",
    )
    dataset_metadata_path: Path | None = option(
        "data",
        "Metadata file (csv, json or jsonl). Defaults to metadata.* in --dataset_base_path.",
    )
    dataset_root: tuple[Path, ...] = option(
        "data",
        "Additional folder that dataset files may be in. Can be repeated.",
        (),
    )
    url_cache: Path | None = option(
        "data",
        "Folder for files that the metadata names by URL. Without it, URLs are refused.",
    )
    on_bad_sample: Literal["error", "skip"] = option(
        "data",
        "What to do with unreadable rows: stop with an error, or skip them and write bad_samples.jsonl.",
        "error",
    )
    on_long_prompt: OnLongPrompt = option(
        "data",
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
        "data",
        "Without --height and --width, scale larger images down to this many pixels.",
        1048576,
        affects={"training", "cache"},
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
    num_frames: int = option(
        "data",
        "Number of video frames per sample.",
        81,
        affects={"training", "cache", "video"},
        minimum=1,
    )
    frame_sampling: SamplingMode = option(
        "data",
        "Which samples to take from a video: its first frames, consecutive chunks, or "
        "--frame_samples evenly spaced clips.",
        "head",
        affects={"training", "cache", "video"},
    )
    frame_samples: int | None = option(
        "data",
        "Number of samples per video with --frame_sampling uniform.",
        affects={"training", "cache", "video"},
        minimum=1,
    )
    feature_cache: Path | None = option(
        "data",
        "Folder of the feature cache: what it lacks is computed first, then training reads it, the encoders freed. "
        "For one stage alone, defaults to --output_path (stage 1) or --dataset_base_path (stage 2).",
    )
