"""Flags that do not fit the variant, or what is trained: refused before anything is opened, in every stage."""

from typing import TYPE_CHECKING

from dstrain.config import TrainConfig
from dstrain.errors import UsageError, nearest
from dstrain.flags import flags, split_commas

if TYPE_CHECKING:
    from dstrain.setup import Setup
    from dstrain.wiring import Wiring

FRAME_FLAGS = ("num_frames", "frame_sampling", "frame_samples")
"""Flags that choose the frames of videos."""


def check_frames(config: TrainConfig, wiring: "Wiring") -> None:
    """Refuse flags that choose frames of videos where there are none."""
    if wiring.reads_videos:
        return
    for flag in flags(TrainConfig):
        if flag.name in FRAME_FLAGS and getattr(config, flag.name) != flag.default:
            raise UsageError(flag.spelled, f"would do nothing: variant {wiring.variant} reads no videos")


def check_components(config: TrainConfig, wiring: "Wiring") -> None:
    """Refuse a flag that names a component which the variant does not have."""
    known = (*wiring.components, *([wiring.expert.role] if wiring.expert else []))
    for flag in ("trainable_models", "lora_base_model", "preset_lora_model"):
        for name in split_commas(getattr(config, flag)):
            if name.partition(".")[0] not in known:
                what = f"{wiring.family} {wiring.variant} has no component {name!r}{nearest(name, known)}"
                raise UsageError(f"--{flag}", what, f"components: {', '.join(wiring.components)}")


def check_saved_names(setup: "Setup") -> None:
    """Refuse flags on the names of saved weights that name, or are for, nothing that is trained."""
    prefix, trained, expert = setup.config.remove_prefix_in_ckpt, setup.trainables.components, setup.wiring.expert
    played = [expert.role] if expert and set(expert.components) & set(trained) else []
    # Saved names carry no such prefix to begin with, so there is nothing to remove.
    known = [f"pipe.{component}." for component in dict.fromkeys([*trained, *played])]
    if prefix is not None and prefix not in known:
        raise UsageError("--remove_prefix_in_ckpt", f"no saved name begins with {prefix!r}; want {' or '.join(known)}")
    component = setup.record.default_trainable
    if setup.saving is not None and component not in [spec.component for spec in setup.trainables.lora]:
        raise UsageError(f"--{setup.saving.name}", f"would do nothing: no LoRA on {component} is trained")
