"""Parse LoRA files as options name them: [COMPONENT=]FILE[:SCALE][@OPTION...]."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dstrain.errors import UsageError

Alpha = float | Literal["rank"]
"""The alpha of a LoRA's layers: a number, or each layer's own rank."""
SKIP_MISSING = "skip_missing"
TRAINING_ONLY = "training_only"
LORA_OPTION = re.compile(
    rf"@(?:(?P<word>{SKIP_MISSING}|{TRAINING_ONLY})|alpha=(?P<alpha>rank|[0-9.eE+-]+))$"
)
"""What may stand at the end of a LoRA file: only these are no part of its name."""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file, and how it is to be read: [COMPONENT=]FILE[:SCALE][@OPTION...]."""

    path: Path
    scale: float = 1.0
    """The factor of what its layers change."""
    component: str = ""
    """The component that it is for, where the command says so."""
    alpha: Alpha | None = None
    """The alpha of all its layers, if the file states none."""
    skip_missing: bool = False
    """Whether layers that the model lacks are left out."""
    training_only: bool = False
    """Whether inference leaves it out, during training and afterwards."""

    def __str__(self) -> str:
        component = f"{self.component}=" if self.component else ""
        return f"{component}{self.path}:{self.scale}{self._options}"

    @property
    def _options(self) -> str:
        alpha = "" if self.alpha is None else f"@alpha={self.alpha}"
        return alpha + (f"@{SKIP_MISSING}" if self.skip_missing else "")

    @property
    def changes(self) -> str:
        """Return what beside the file's content decides what it does; '' for nothing."""
        scale = "" if self.scale == 1 else f":{self.scale}"
        return scale + self._options

    @property
    def typed(self) -> str:
        """Return it as it is typed, without what it need not say."""
        component = f"{self.component}=" if self.component else ""
        mark = f"@{TRAINING_ONLY}" if self.training_only else ""
        return f"{component}{self.path}{self.changes}{mark}"

    def of(self, components: Collection[str]) -> "LoraFile":
        """Return it with the component that its path begins with (`dit2=FILE`): what
        stands before the first '=' is one only if it is the name of one.
        """
        head, _, rest = str(self.path).partition("=")
        if self.component or not rest or head not in components:
            return self
        return replace(self, path=Path(rest), component=head)


def parse_lora(text: str) -> LoraFile:
    """Parse what `parse_preset` does; raises UsageError for @training_only, too."""
    file = parse_preset(text)
    if file.training_only:
        raise UsageError(f"@{TRAINING_ONLY}", f"is for --preset_lora_path: {text}")
    return file


def parse_preset(text: str) -> LoraFile:
    """Parse FILE[:SCALE][@alpha=ALPHA][@skip_missing][@training_only], in which a
    component may still stand before the file (`LoraFile.of`).

    A scale is a finite number after the last colon; `./dit=a` is the file `dit=a` here.
    Raises UsageError for an option that is given twice, or an alpha that is none.
    """
    options: dict[str, Any] = {}
    found = LORA_OPTION.search(text)
    while found is not None:
        name = found["word"] or "alpha"
        if name in options:
            raise UsageError(f"@{name}", f"is given twice: {text}")
        alpha = found["alpha"]
        options[name] = parse_alpha(alpha, "@alpha") if alpha else True
        text = text[: found.start()]
        found = LORA_OPTION.search(text)
    path, _, tail = text.rpartition(":")
    try:
        scale = float(tail)
    except ValueError:
        scale = math.nan
    if not path or not math.isfinite(scale):
        path, scale = text, 1.0
    file = Path(path)
    if path.startswith("./") and any("=" in one for one in file.parts[:1]):
        file = file.absolute()  # as a relative path, it would lose the './'
    return LoraFile(file, scale, **options)


def parse_alpha(text: str, flag: str = "--alpha") -> Alpha:
    """Parse the alpha of a LoRA: a number above 0, or 'rank'; raises UsageError for
    anything else.
    """
    if text == "rank":
        return "rank"
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not (math.isfinite(alpha) and alpha > 0):
        raise UsageError(flag, f"expected a number above 0, or rank, got {text!r}")
    return alpha
