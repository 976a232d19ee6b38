"""What each family learns of the demo's digits: a small model of each, trained in full,
then a LoRA of a new look on it, both in two stages, with the demo's batches and learning
rates; Qwen-Image's share that is read right is what the others are measured by.

Qwen-Image has the demo's VAE. Those of the other families are trained here first, for
less than a minute, on digits in both looks.
"""

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import click
import torch
from dstrain import TrainConfig
from dstrain.registry import load_family
from on_digits import DEMO, generated, of_base, of_lora, share, two_stages
from report import table
from safetensors import safe_open
from small_vae import train_vae

TOKENS = 96
"""Tokens of a prompt of digits, at most."""
VAE = MappingProxyType({"block_out_channels": (16, 32, 32, 32)})
"""Sizes of the VAEs that are trained here."""


@dataclass(frozen=True)
class Small:
    """A family's toy, made large enough to learn digits: one to three million weights."""

    denoiser: Mapping[str, Any]
    """Entries of the denoiser's configuration that replace the toy's own."""
    vae: Path | None = None
    """A trained VAE; None to train the family's own."""
    variant: str = ""
    """Its variant; '' for the toy's own, the first."""
    learning_rate: float = 1e-3
    """That of full training; the LoRA has twice as much."""
    tokens: str = ""
    """The constant of its code that says to how many tokens prompts are padded, which is
    made `TOKENS`: on a CPU the published 512 would take most of the time.
    """
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Entries that replace the toy's own of further components."""


FAMILIES: Mapping[str, Small] = MappingProxyType(
    {
        "qwen_image": Small(
            {
                "num_layers": 4,
                "attention_head_dim": 32,
                "num_attention_heads": 4,
                "axes_dims_rope": (8, 12, 12),
            },
            DEMO / "vae",
        ),
        "z_image": Small(
            {
                "dim": 128,
                "n_heads": 4,
                "n_kv_heads": 4,
                "n_layers": 4,
                "axes_dims": (8, 12, 12),
            },
            learning_rate=3e-3,
        ),
        "sdxl": Small(
            {
                "block_out_channels": (64, 128, 128),
                "layers_per_block": 1,
                "norm_num_groups": 8,
                "transformer_layers_per_block": (1, 1, 1),
                "attention_head_dim": (2, 4, 4),
            },
            # The UNet normalizes no states of text: those of the toy's encoders, which
            # differ by a twentieth between prompts, would tell it too little.
            others={
                "text_encoder": {"initializer_factor": 3.0},
                "text_encoder_2": {"initializer_factor": 3.0},
            },
        ),
        "flux2": Small(
            {
                "num_layers": 2,
                "num_single_layers": 2,
                "attention_head_dim": 32,
                "num_attention_heads": 4,
                "axes_dims_rope": (8, 8, 8, 8),
            },
            variant="klein-base",
            tokens="dstrain_flux2.units:TOKENS",
        ),
    }
)
HEAD = (
    "family",
    "weights, million",
    "full: read right, of 100",
    "least and most",
    "LoRA: read right, in the look",
    "least and most",
    "CPU minutes",
)


def write_model(folder: Path, name: str, vae_steps: int) -> float:
    """Write the small model of a family, with a trained VAE; return how many million
    weights its denoiser has.
    """
    from digits import TRAIN, strokes

    small, family = FAMILIES[name], load_family(name)
    if small.tokens:
        module, _, constant = small.tokens.partition(":")
        setattr(import_module(module), constant, TOKENS)
    sizes = {family.default_trainable: small.denoiser, **small.others}
    if small.vae is None:
        sizes["vae"] = VAE
    family.load("toy")(folder, small.variant or family.variants[0], 0, sizes)
    if small.vae is None:
        torch.manual_seed(0)
        train_vae(folder / "vae", torch.from_numpy(strokes()[0][:TRAIN]), vae_steps)
    else:
        shutil.rmtree(folder / "vae")
        shutil.copytree(small.vae, folder / "vae")
    folders = {one.name: one.folder for one in family.load("components")}
    denoiser = folder / folders[family.default_trainable]
    count = 0
    for file in denoiser.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            shapes = [opened.get_slice(key).get_shape() for key in names]
        count += sum(map(math.prod, shapes))
    return count / 1e6


def judged(
    out: Path, name: str, seed: int, steps: tuple[int, int], each: int, judge: Any
) -> tuple[float, float]:
    """Train a family's model in full and then a LoRA on it; return how many of 100 images
    of each are read right and are in its look.
    """
    from digits import LOOK, PLAIN, caption

    family = load_family(name)
    trained = family.default_trainable
    # The scale of guidance that is none.
    small = FAMILIES[name]
    variant = small.variant or family.variants[0]
    scale = family.spec(variant).no_guidance
    shared: dict[str, Any] = {
        "model": name,
        "variant": variant,
        "model_id": str(out / "model"),
        "feature_cache": out / "cache",
        "seed": seed,
    }
    shares = []
    full, lora = (out / f"{kind}-{seed}" for kind in ("full", "lora"))
    given = of_base(steps[0]) | {"dataset_base_path": out.parent / "digits"}
    given["learning_rate"] = small.learning_rate
    two_stages(
        TrainConfig(**shared, **given, trainable_models=trained, output_path=full)
    )
    weights = full / f"step-{steps[0]}.safetensors"
    given = of_lora(steps[1]) | {"dataset_base_path": out.parent / "look"}
    given["learning_rate"] = 2 * small.learning_rate
    given["model_paths"] = json.dumps([str(weights)])
    two_stages(
        TrainConfig(**shared, **given, lora_base_model=trained, output_path=lora)
    )
    for folder, look in ((full, PLAIN), (lora, LOOK)):
        prompts = [caption(digit, look) for digit in range(10)]
        made = generated(
            folder / "judged", prompts, each, scale, model=name, run=folder
        )
        shares.append(share(made, each, look, judge))
    return shares[0], shares[1]


def rows_of(
    out: Path,
    names: tuple[str, ...],
    steps: tuple[int, int],
    vae_steps: int,
    seeds: int,
    each: int,
    count: int,
) -> Iterator[tuple[str, ...]]:
    """Train and judge each family; yield the rows of the table."""
    sys.path.insert(0, str(DEMO))
    from digits import LOOK, LOOK_IMAGES, TRAIN, Judge, write

    judge = Judge()
    write(out / "digits", count=min(TRAIN, count))
    write(out / "look", LOOK, min(LOOK_IMAGES, count))
    for name in names:
        start = time.process_time()
        folder = out / name
        weights = write_model(folder / "model", name, vae_steps)
        pairs = []
        for seed in range(seeds):
            pairs.append(judged(folder, name, seed, steps, each, judge))
            click.echo(f"{name}, seed {seed}: {pairs[-1]}", err=True)
        cells = []
        for shares in zip(*pairs, strict=True):
            cells.append(f"{statistics.fmean(shares):.0f}")
            cells.append(f"{min(shares):.0f} to {max(shares):.0f}")
        minutes = (time.process_time() - start) / 60
        yield (name, f"{weights:.1f}", *cells, f"{minutes:.1f}")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(FAMILIES)))
@click.option("--full_steps", default=500, show_default=True)
@click.option("--lora_steps", default=250, show_default=True)
@click.option("--vae_steps", default=400, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--each", default=10, show_default=True, help="Images of each digit.")
@click.option("--images", default=1500, show_default=True, help="Digits to train on.")
def main(
    names: tuple[str, ...],
    full_steps: int,
    lora_steps: int,
    vae_steps: int,
    seeds: int,
    each: int,
    images: int,
) -> None:
    """Print the table of the families NAMES, by default all."""
    with TemporaryDirectory() as folder:
        rows = rows_of(
            Path(folder),
            names or tuple(FAMILIES),
            (full_steps, lora_steps),
            vae_steps,
            seeds,
            each,
            images,
        )
        click.echo(table(HEAD, list(rows)))


if __name__ == "__main__":
    main()
