"""The options of data are exactly these, and what each of them affects is frozen."""

from dstrain.config.options.data import DataOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "alpha_mask": (False, "cache dataset mask resolved"),
    "column": ((), "cache dataset if_given resolved"),
    "data_file_keys": (None, "cache resolved"),
    "dataset": ((), "resolved"),
    "dataset_base_path": (None, "dataset"),
    "dataset_metadata_path": (None, "dataset"),
    "dataset_num_workers": (0, ""),
    "dataset_repeat": (1, "training"),
    "dataset_root": ((), ""),
    "default_caption": (None, "cache dataset if_given resolved"),
    "extra_inputs": (None, "cache resolved"),
    "feature_cache": (None, ""),
    "frame_samples": (None, "cache dataset training video"),
    "fix_frame_rate": (None, "cache if_given training video"),
    "frame_sampling": ("head", "cache dataset training video"),
    "mask_column": (None, "cache dataset mask resolved"),
    "max_pixels": (1048576, "cache dataset training"),
    "num_frames": (81, "cache dataset training video"),
    "on_bad_sample": ("error", ""),
    "on_long_prompt": ("truncate", ""),
    "unmasked_weight": (0.0, "cache dataset mask resolved"),
    "url_cache": (None, ""),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(DataOptions) == OPTIONS
