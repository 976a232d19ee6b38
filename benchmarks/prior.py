"""What prior preservation keeps: the demo's model, which knows digits in black ink on
white paper, and LoRAs of a new look, with and without images that the model itself made
of the old one.

Each LoRA sees as many images of the new look. Their captions say nothing of
colours, as those of a subject say nothing that tells it from others of its class, but
begin with a word of their own, `sks`. What is asked for without this word should still be
black on white.
"""

import csv
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from on_digits import (
    DEMO,
    base_of,
    generated,
    lora_trials,
    model_files,
    share,
    train_config,
    two_stages,
)

CASES: Mapping[str, float | None] = MappingProxyType(
    {
        "the new look alone": None,
        "with images of the old one, loss_weight 0.5": 0.5,
        "with images of the old one, loss_weight 1": 1.0,
    }
)
"""Name in the table -> weight of the loss on images of the old look."""
HEAD = (
    "LoRA trained on",
    "asked for the new look: right, in it",
    "least and most",
    "asked for the old look: right, in it",
    "least and most",
)
TRIGGER = "sks, "
"""What the captions of the new look begin with."""
FIRST_SEED_OF_CLASS = 10_000
"""Images of the class have other seeds than those that are judged."""


def write_look(folder: Path, count: int) -> None:
    """Write digits in the new look whose captions say nothing of colours."""
    from digits import LOOK, caption, paint, strokes

    folder.mkdir(parents=True)
    images, digits = strokes()
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("image", "prompt"))
        for index in range(count):
            name = f"{index}.png"
            paint(images[index], LOOK).save(folder / name)
            rows.writerow((name, TRIGGER + caption(digits[index])))


def rows_of(
    out: Path,
    demo: Path | None,
    full_steps: int,
    lora_steps: int,
    seeds: int,
    each: int,
    count: int,
) -> Iterator[tuple[str, ...]]:
    """Train and judge; yield the rows of the table."""
    sys.path.insert(0, str(DEMO))
    from digits import LOOK, LOOK_IMAGES, PLAIN, TRAIN, Judge, caption, write

    judge = Judge()
    write(out / "digits", count=min(TRAIN, count))
    shown = min(LOOK_IMAGES, count)
    write_look(out / "look", shown)
    base = base_of(out, demo, full_steps)
    old = [caption(digit) for digit in range(10)]
    new = [TRIGGER + prompt for prompt in old]
    files = model_files(out, base)
    of_class = out / "class"
    generated(
        of_class,
        old,
        max(shown // 10, 1),
        first_seed=FIRST_SEED_OF_CLASS,
        model_paths=files,
    )

    def judged(folder: Path, **more: Any) -> tuple[float, float]:
        made = generated(folder / "new", new, each, **more)
        kept = generated(folder / "old", old, each, **more)
        return share(made, each, LOOK, judge), share(kept, each, PLAIN, judge)

    found = {"nothing (the base)": [judged(out / "judged", model_paths=files)]}
    plain = train_config(
        out,
        base,
        mixed_precision="no",
        dataset_base_path=out / "look",
        feature_cache=out / "cache",
        lora_base_model="dit",
        lora_rank=16,
        learning_rate=2e-3,
        batch_size=32,
    )
    for name, weight in CASES.items():
        second = ()
        steps = lora_steps
        if weight is not None:
            # Half of the draws are then of the old look.
            steps = 2 * lora_steps
            place = str(of_class / "images")
            entry = {"dataset_base_path": place, "loss_weight": weight}
            second = (json.dumps(entry),)
        found[name] = []
        for seed in range(seeds):
            folder = out / f"lora-{weight}-{seed}"
            config = replace(
                plain,
                dataset=second,
                output_path=folder,
                seed=seed,
                max_steps=steps,
                save_steps=steps,
            )
            two_stages(config)
            found[name].append(judged(out / f"judged-{weight}-{seed}", run=folder))
            click.echo(f"{name}, seed {seed}: {found[name][-1]}", err=True)
    for name, pairs in found.items():
        cells = []
        for shares in zip(*pairs, strict=True):
            cells.append(f"{statistics.fmean(shares):.0f}")
            cells.append(f"{min(shares):.0f} to {max(shares):.0f}")
        yield (name, *cells)


main = lora_trials(HEAD, rows_of)


if __name__ == "__main__":
    main()
