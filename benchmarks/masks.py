"""What a mask keeps a LoRA from learning: the demo's digits in a new look, of which the
right half is spoiled, trained as they are and with a mask that leaves this half out.

The demo's small Qwen-Image is trained in full on digits once. Then a LoRA of the look is
trained on it for each kind of images and each seed, and judged on whole digits of writers
that no training saw: the mean error in the half that the mask keeps, and in the other.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import numpy as np
from on_digits import (
    DEMO,
    HELD_OUT,
    base_of,
    held_out_loss,
    lora_trials,
    train_config,
    two_stages,
)
from PIL import Image

CASES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "whole images": {"dataset": "whole"},
        "spoiled images": {"dataset": "spoiled"},
        "spoiled images, masked": {"dataset": "spoiled", "mask_column": "kept"},
    }
)
"""Name in the table -> what the LoRA is trained on."""
HEAD = (
    "trained on",
    "error inside the mask",
    "least and most",
    "outside",
    "least and most",
)
BLUE = (30, 60, 200)
"""What is over the right half of a spoiled image: stripes of this colour."""
SIDES = MappingProxyType({"inside": "kept", "outside": "other"})
"""Where errors are measured -> the column of masks of these halves."""


def spoil(image: Image.Image) -> Image.Image:
    """Paint stripes over the right half of an image."""
    pixels = np.array(image)
    right = pixels[:, pixels.shape[1] // 2 :]
    right[np.arange(len(right)) // 8 % 2 == 0] = BLUE
    right[np.arange(len(right)) // 8 % 2 == 1] = 0
    return Image.fromarray(pixels)


def write_halves(folder: Path, side: int) -> None:
    """Write the masks of both halves: `kept.png` and `other.png`."""
    left = np.zeros((side, side), np.uint8)
    left[:, : side // 2] = 255
    Image.fromarray(left).save(folder / "kept.png")
    Image.fromarray(255 - left).save(folder / "other.png")


def write_data(folder: Path, first: int, count: int, is_spoiled: bool = False) -> None:
    """Write digits in the look as a dataset with two columns of masks."""
    from digits import LOOK, SIZE, caption, paint, strokes

    folder.mkdir(parents=True)
    write_halves(folder, SIZE)
    images, digits = strokes()
    lines = ["image,prompt,kept,other"]
    for index in range(first, first + count):
        image = paint(images[index], LOOK)
        (spoil(image) if is_spoiled else image).save(folder / f"{index}.png")
        text = caption(digits[index], LOOK)
        lines.append(f'{index}.png,"{text}",kept.png,other.png')
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


def errors(config: Any, held: Path, lora: Path | None) -> list[float]:
    """Return the mean losses of both halves of the held-out digits."""
    found = []
    for column in SIDES.values():
        masked = replace(config, mask_column=column)
        found.append(held_out_loss(masked, held, lora))
    return found


def rows_of(
    out: Path,
    demo: Path | None,
    full_steps: int,
    lora_steps: int,
    seeds: int,
    count: int,
) -> Iterator[tuple[str, ...]]:
    """Train and judge; yield the rows of the table."""
    sys.path.insert(0, str(DEMO))
    from digits import LOOK_IMAGES, TRAIN, write

    write(out / "digits", count=min(TRAIN, count))
    shown = min(LOOK_IMAGES, count)
    write_data(out / "whole", 0, shown)
    write_data(out / "spoiled", 0, shown, is_spoiled=True)
    write_data(out / "held-out", TRAIN, min(HELD_OUT, count))
    base = base_of(out, demo, full_steps)
    # In fp32, which a CPU is faster at.
    plain = train_config(out, base, lora_base_model="dit")
    untrained = replace(plain, mixed_precision="no", output_path=out / "none")
    found = {"nothing (the base)": [errors(untrained, out / "held-out", None)]}
    for name, case in CASES.items():
        found[name] = []
        for seed in range(seeds):
            folder = out / f"lora-{name}-{seed}"
            config = replace(
                untrained,
                dataset_base_path=out / case["dataset"],
                mask_column=case.get("mask_column"),
                feature_cache=out / "cache",
                output_path=folder,
                lora_rank=16,
                learning_rate=2e-3,
                batch_size=32,
                max_steps=lora_steps,
                save_steps=lora_steps,
                seed=seed,
            )
            two_stages(config)
            lora = folder / f"step-{lora_steps}.safetensors"
            found[name].append(errors(config, out / "held-out", lora))
            click.echo(f"{name}, seed {seed}: {found[name][-1]}", err=True)
    for name, pairs in found.items():
        cells = []
        for losses in zip(*pairs, strict=True):
            cells.append(f"{statistics.fmean(losses):.3f}")
            cells.append(f"{min(losses):.3f} to {max(losses):.3f}")
        yield (name, *cells)


main = lora_trials(HEAD, rows_of)


if __name__ == "__main__":
    main()
