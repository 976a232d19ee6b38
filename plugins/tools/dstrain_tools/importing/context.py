"""What a conversion of one key looks at beside its value."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.plugin import ModelFamily

from dstrain_tools.importing.entries import Entry, Result, Source
from dstrain_tools.importing.tables import Table

HIGH_NOISE = "dit"
LOW_NOISE = "dit2"
"""The components of the two experts of Wan 2.2."""


@dataclass(frozen=True)
class Model:
    """The model that a configuration trains."""

    family: ModelFamily
    model_id: str
    """A published id; '' if none is told."""
    reason: str
    """What tells it."""

    @property
    def variant(self) -> str:
        """Return the variant that the id means, the first of several; '' for none."""
        found = self.family.variants_of(self.model_id) if self.model_id else []
        return found[0] if found else ""

    @property
    def encoders(self) -> tuple[str, ...]:
        """Return the text encoders."""
        names = self.family.lora_targets
        return tuple(name for name in names if name.startswith("text_encoder"))

    @property
    def has_experts(self) -> bool:
        """Return whether two networks share the timesteps, as the files of the variant's
        published models tell.
        """
        if not self.variant:
            return False
        return any(
            LOW_NOISE in files
            for model_id, files in self.family.model_files.items()
            if self.variant in self.family.variants_of(model_id)
        )


@dataclass
class Context:
    """Where a conversion looks things up."""

    source: Source
    table: Table
    model: Model
    output: Path | None
    """The file that is written, None for standard output."""
    given: Mapping[str, Entry]
    """Keys of the run."""
    own: Mapping[str, Entry] = field(default_factory=dict)
    """Keys of the dataset, where the entry is of one."""
    key: str = ""
    """The key that is converted."""
    number: int = 0
    """Number of the dataset, from 1; 0 for a key of the run."""
    tables: dict[Path, str] = field(default_factory=dict)
    """Tables of datasets that are written beside the output."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of another key: of the dataset, else of the run."""
        entry = self.own.get(key) or self.given.get(key)
        return default if entry is None else entry.value

    @property
    def trains_lora(self) -> bool:
        """Return whether a LoRA is trained, and not the weights themselves."""
        return any(key.startswith("network") for key in self.given)

    @property
    def output_folder(self) -> str:
        """Return the folder of all runs."""
        found = self.value("output_dir") or self.value("training_folder")
        return single(found or "output")

    @property
    def trained_encoders(self) -> tuple[str, ...]:
        """Return the text encoders that are trained: where the tool does so by itself, all
        unless told otherwise, else those that it is told to.
        """
        is_told = self.is_on("train_text_encoder") or self.is_on(
            "train.train_text_encoder"
        )
        if self.trains_lora and self.table.lora_of_encoders:
            is_told = not self.is_on("network_train_unet_only")
        if not self.table.trains_encoders or not is_told:
            return ()
        return tuple(name for name in self.model.encoders if self.encoder_rate(name))

    def encoder_rate(self, encoder: str) -> Any:
        """Return the learning rate of a text encoder, 0 if it is not trained; that of the
        denoiser where it has none of its own.
        """
        number = self.model.encoders.index(encoder)
        key = "text_encoder_lr" if self.trains_lora else f"learning_rate_te{number + 1}"
        for name in (key, f"train.{key}"):
            rates = [one for one in as_list(self.value(name, [])) if one is not None]
            if rates:
                rate = rates[min(number, len(rates) - 1)]
                return rate if as_number(rate) else 0
        return self.denoiser_rate

    @property
    def denoiser_rate(self) -> Any:
        """Return the learning rate of the denoiser."""
        for key in ("unet_lr", "train.unet_lr", "learning_rate", "train.lr"):
            if self.value(key):
                return self.value(key)
        defaults = self.table.defaults["run"]
        return defaults.get("learning_rate", defaults.get("train.lr"))

    def is_on(self, key: str) -> bool:
        """Return whether another key is true."""
        return truth(self.value(key, False))


Conversion = Callable[[str, Any, Context], Result]
"""(our option, the value, where to look things up) -> what becomes of it."""


def truth(value: Any) -> bool:
    """Return whether a value means yes."""
    return str(value).lower() in ("true", "1", "yes")


def single(value: Any) -> str:
    """Return a value as text; raises ValueError for several values."""
    if isinstance(value, list | tuple):
        raise ValueError("expected one word: write it in quotes")
    return str(value)


def as_number(value: Any) -> float:
    """Return a value as a number; raises ValueError for none, and for one without end."""
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError("a number is expected") from error
    if not math.isfinite(found):
        raise ValueError("a finite number is expected")
    return found


def as_whole_number(value: Any) -> int:
    """Return a value as a whole number; raises ValueError for none."""
    try:
        return int(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError("a whole number is expected") from error


def as_list(value: Any) -> Sequence[Any]:
    """Return a value, or several, as a list."""
    return value if isinstance(value, list | tuple) else [value]
