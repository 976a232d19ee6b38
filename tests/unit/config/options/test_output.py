"""The options of output are exactly these, and what each of them affects is frozen."""

from dstrain.config.options.output import OutputOptions

from tests.support.options import options_of

OPTIONS: dict[str, tuple[object, str]] = {
    "keep_checkpoints": (None, ""),
    "lora_format": (None, ""),
    "output_path": (None, ""),
    "overwrite": (False, "start"),
    "preview_prompt": ((), ""),
    "preview_steps": (None, ""),
    "remove_prefix_in_ckpt": (None, ""),
    "resume": (None, "start"),
    "resume_from_checkpoint": (None, "weights"),
    "save_steps": (None, ""),
}
"""Name -> default and effects. Stored files are compared by the effects."""


def test_the_options_are_these() -> None:
    assert options_of(OutputOptions) == OPTIONS
