"""What storing a base in fewer bytes costs a LoRA: the demo's digits in a new look,
trained on bases in bf16, fp8, int8 and nf4.

The demo's small Qwen-Image is trained in full on digits once. Then a LoRA of the look is
trained on it for each method and seed, and judged on digits of writers that no training
saw: the mean loss, and the share of generated digits that the demo's judge reads right in
the look's colours.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType

import click
from on_digits import (
    DEMO,
    HELD_OUT,
    base_of,
    generated,
    held_out_loss,
    lora_trials,
    of_lora,
    share,
    train_config,
    two_stages,
)

METHODS: Mapping[str, str | None] = MappingProxyType(
    {
        "bf16": None,
        "int8_block": "dit:int8_block",
        "fp8": "dit:fp8",
        "nf4": "dit:bitsandbytes_nf4",
    }
)
"""Name in the table -> --quant_options."""
HEAD = (
    "base",
    "held-out loss, mean over seeds",
    "least and most",
    "read right, of 100",
    "least and most",
)


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
    from digits import LOOK, LOOK_IMAGES, TRAIN, Judge, caption, paint, strokes, write

    judge = Judge()
    prompts = [caption(digit, LOOK) for digit in range(10)]
    write(out / "digits", count=min(TRAIN, count))
    write(out / "look", LOOK, min(LOOK_IMAGES, count))
    held = out / "held-out"
    held.mkdir()
    images, digits = strokes()
    lines = ["image,prompt"]
    for index in range(TRAIN, TRAIN + min(HELD_OUT, count)):
        name = f"{index}.png"
        paint(images[index], LOOK).save(held / name)
        lines.append(f'{name},"{caption(digits[index], LOOK)}"')
    (held / "metadata.csv").write_text("\n".join(lines) + "\n")
    base = base_of(out, demo, full_steps)
    losses: dict[str, list[float]] = {method: [] for method in METHODS}
    shares: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed, (method, options) in product(range(seeds), METHODS.items()):
        folder = out / f"lora-{method}-{seed}"
        config = train_config(
            out,
            base,
            dataset_base_path=out / "look",
            feature_cache=out / "cache",
            output_path=folder,
            lora_base_model="dit",
            quant_options=options,
            seed=seed,
            **of_lora(lora_steps),
        )
        two_stages(config)
        lora = folder / f"step-{lora_steps}.safetensors"
        losses[method].append(held_out_loss(config, held, lora))
        made = generated(out / f"judged-{method}-{seed}", prompts, each, run=folder)
        shares[method].append(share(made, each, LOOK, judge))
        found = f"loss {losses[method][-1]:.4f}, {shares[method][-1]:.0f} % read right"
        click.echo(f"{method}, seed {seed}: {found}", err=True)
    for method in METHODS:
        yield (
            method,
            f"{statistics.fmean(losses[method]):.4f}",
            f"{min(losses[method]):.4f} to {max(losses[method]):.4f}",
            f"{statistics.fmean(shares[method]):.0f}",
            f"{min(shares[method]):.0f} to {max(shares[method]):.0f}",
        )


main = lora_trials(HEAD, rows_of)


if __name__ == "__main__":
    main()
