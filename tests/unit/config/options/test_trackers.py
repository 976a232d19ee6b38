"""The options of trackers are exactly these, none affects a number of a run, and each of the
ways to ask for a tracker names it once.
"""

from dataclasses import replace

from dstrain.config.options.trackers import TrackerOptions

from tests.support.command_lines import toy_config
from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "enable_csv_log": (False, ""),
    "enable_swanlab_log": (False, ""),
    "enable_tensorboard_log": (False, ""),
    "enable_wandb_log": (False, ""),
    "report_to": (None, ""),
    "swanlab_project": (None, ""),
    "wandb_project": (None, ""),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(TrackerOptions) == OPTIONS


def test_a_tracker_is_asked_for_by_either_flag() -> None:
    config = toy_config(report_to="wandb, tensorboard", enable_wandb_log=True)
    assert config.trackers == ("wandb", "tensorboard")
    assert replace(config, report_to=None).trackers == ("wandb",)
    assert toy_config(enable_swanlab_log=True).trackers == ("swanlab",)
    assert toy_config(enable_tensorboard_log=True).trackers == ("tensorboard",)
    assert toy_config(enable_csv_log=True).trackers == ()
