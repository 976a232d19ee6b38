"""A Qwen-Image of toy sizes with random weights, in the published layout.

The text encoder has dropout, so that one left in training mode is noticed, and an
initial range that makes prompts differ clearly. The tokenizers turn the prefix of the
chat template into as many tokens as the real one does.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import toy_writer

from dstrain_qwen_image.components import COMPONENTS, CONFIGS

TOY = json.loads((CONFIGS / "toy.json").read_bytes())
write_components = toy_writer(COMPONENTS, **TOY)


def write(
    folder: Path,
    variant: str = "base",
    seed: int = 0,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a toy of `variant` to `folder`; equal arguments write equal files.

    sizes: component -> entries of its config.json that replace the toy's own.
    """
    write_components(folder, variant, seed, sizes)
    tokenizer, processor = folder / "tokenizer", folder / "processor"
    if processor.is_dir():
        # A published processor has the files of a tokenizer beside its own.
        shutil.copytree(tokenizer, processor, dirs_exist_ok=True)
