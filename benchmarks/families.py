"""What each family learns of the demo's digits: a small model of each, trained in full,
then a LoRA of a new look on it, both in two stages, as the demo does, with batches half
as large; Qwen-Image's share that is read right is what the others are measured by. Seeds
are trained side by side.

Qwen-Image has the demo's model. The VAEs of the other families are trained here first,
for a minute or two, on digits in both looks, and their tokenizers, as published ones,
have words: of the toys' letters, few would tell the digit.
"""

import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import click
import torch
from dstrain import TrainConfig, run
from dstrain.lazy import import_name
from dstrain.registry import load_family
from on_digits import DEMO, generated, of_base, of_lora, share
from report import table
from safetensors import safe_open
from small_vae import train_vae

ONE_THREAD = (torch.set_num_threads, (1,))
"""What a process of a seed calls first."""
ANSWER = ("user\n", "assistant\n", "<think>\n\n</think>\n\n")
"""Words of Qwen's chat templates."""
BATCHES = (32, 16)
"""Images of a step of full training, and of the LoRA's."""
VAE = MappingProxyType({"block_out_channels": (16, 32, 32, 32)})
"""Sizes of the VAEs that are trained here."""


@dataclass(frozen=True)
class Small:
    """A family's toy, made large enough to learn digits: two to six million weights."""

    denoiser: Mapping[str, Any]
    """Entries of the denoiser's configuration that replace the toy's own."""
    vae: Path | None = None
    """A trained VAE; None to train the family's own."""
    variant: str = ""
    """Its variant; '' for the toy's own, the first."""
    learning_rates: tuple[float, float] = (1e-3, 2e-3)
    """That of full training, and that of the LoRA."""
    timestep_shift: float | None = None
    """That of training, where the model's own is not near that of inference."""
    more_targets: tuple[str, ...] = ()
    """Layers that the LoRA changes beside the family's default ones."""
    padded: tuple[str, int] | None = None
    """The constant of its code that says to how many tokens prompts are padded, and a
    number in its place: on a CPU tokens of padding would take most of the time, and they
    would outnumber those that tell the digit.
    """
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Entries that replace the toy's own of further components. Text encoders of larger
    initial weights have states that differ more between prompts, and none of these
    denoisers but Z-Image's normalizes them.
    """


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
            learning_rates=(2e-3, 4e-3),
            padded=(
                "diffusers.models.transformers.transformer_z_image.SEQ_MULTI_OF",
                16,
            ),
            others={"text_encoder": {"vocab_size": 300, "initializer_range": 0.3}},
        ),
        # Of those that predict the noise, losses weigh next to nothing where there is much
        # of it, and where it is decided which digit it becomes: they learn more slowly.
        "sdxl": Small(
            {
                "block_out_channels": (32, 64, 96),
                "layers_per_block": 1,
                "norm_num_groups": 8,
                "transformer_layers_per_block": (1, 1, 1),
                "attention_head_dim": (2, 2, 3),
            },
            variant="v",
            learning_rates=(2e-3, 2e-3),
            # Where latents are finest there is no attention, which has the default ones.
            more_targets=("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
            others={
                "text_encoder": {"vocab_size": 560, "initializer_factor": 2.0},
                "text_encoder_2": {"vocab_size": 560, "initializer_factor": 2.0},
            },
        ),
        # Wider than a token's 128 numbers, all of which it must know to predict noise.
        "flux2": Small(
            {
                "num_layers": 1,
                "num_single_layers": 2,
                "mlp_ratio": 2.0,
                "attention_head_dim": 32,
                "num_attention_heads": 6,
                "axes_dims_rope": (8, 8, 8, 8),
            },
            variant="klein-base",
            learning_rates=(3e-3, 4e-3),
            # In training the shift is 1.6 at 16 tokens, in 20 steps of inference 6.2.
            timestep_shift=5.0,
            padded=("dstrain_flux2.units.TOKENS", 12),
            others={"text_encoder": {"vocab_size": 150, "initializer_range": 0.15}},
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
    "minutes",
    "CPU minutes",
)


def with_padding(name: str) -> AbstractContextManager[Any]:
    """Have a family pad prompts as its small model says."""
    padded = FAMILIES[name].padded
    return patch(*padded) if padded else nullcontext()


def add_words(folder: Path) -> None:
    """Add the words of digits' captions to the tokenizers of a model."""
    from digits import LOOK, NAMES

    words = [*ANSWER, "a picture of the number ", *NAMES, LOOK.words]
    for one in folder.glob("tokenizer*"):
        tokenizer = import_name("transformers", "AutoTokenizer").from_pretrained(one)
        tokenizer.add_tokens(words, special_tokens=True)
        tokenizer.save_pretrained(one)


def write_model(folder: Path, name: str, vae_steps: int) -> float:
    """Write the small model of a family, with a trained VAE; return how many million
    weights its denoiser has.
    """
    from digits import TRAIN, strokes

    small, family = FAMILIES[name], load_family(name)
    sizes = {family.default_trainable: small.denoiser, **small.others}
    if small.vae is None:
        sizes["vae"] = VAE
    family.load("toy")(folder, small.variant or family.variants[0], 0, sizes)
    if small.vae is None:
        add_words(folder)
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


def configurations(
    out: Path, name: str, seed: int, steps: tuple[int, int]
) -> tuple[TrainConfig, TrainConfig]:
    """Return how a family's model is trained in full, and then a LoRA on it."""
    small, family = FAMILIES[name], load_family(name)
    full, lora = (out / f"{kind}-{seed}" for kind in ("full", "lora"))
    shared: dict[str, Any] = {
        "model": name,
        "variant": small.variant or family.variants[0],
        "model_id": str(out / "model"),
        "timestep_shift": small.timestep_shift,
        "feature_cache": out / "cache",
        "seed": seed,
    }
    rates = [
        {"learning_rate": rate, "batch_size": batch}
        for rate, batch in zip(small.learning_rates, BATCHES, strict=True)
    ]
    given = of_base(steps[0]) | rates[0]
    first = TrainConfig(
        **shared,
        **given,
        dataset_base_path=out.parent / "digits",
        trainable_models=family.default_trainable,
        output_path=full,
    )
    given = of_lora(steps[1]) | rates[1]
    if small.more_targets:
        targets = (*family.lora_targets[family.default_trainable], *small.more_targets)
        given["lora_target_modules"] = ",".join(targets)
    second = TrainConfig(
        **shared,
        **given,
        dataset_base_path=out.parent / "look",
        model_paths=json.dumps([str(full / f"step-{steps[0]}.safetensors")]),
        lora_base_model=family.default_trainable,
        output_path=lora,
    )
    return first, second


def judged(
    out: Path, name: str, seed: int, steps: tuple[int, int], each: int
) -> tuple[float, float]:
    """Train a family's model in full and then a LoRA on it; return how many of 100 images
    of each are read right and are in its look.
    """
    sys.path.insert(0, str(DEMO))
    from digits import LOOK, PLAIN, Judge, caption

    judge, family = Judge(), load_family(name)
    # The scale of guidance that is none.
    scale = family.spec(FAMILIES[name].variant or family.variants[0]).no_guidance
    shares = []
    for config, look in zip(
        configurations(out, name, seed, steps), (PLAIN, LOOK), strict=True
    ):
        prompts = [caption(digit, look) for digit in range(10)]
        folder = Path(config.output_path)
        with with_padding(name):
            run(replace(config, task="sft:train"))
            made = generated(
                folder / "judged", prompts, each, scale, model=name, run=folder
            )
        shares.append(share(made, each, look, judge))
    click.echo(f"{name}, seed {seed}: {shares}", err=True)
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
    from digits import LOOK, LOOK_IMAGES, TRAIN, write

    write(out / "digits", count=min(TRAIN, count))
    write(out / "look", LOOK, min(LOOK_IMAGES, count))
    for name in names:
        start, cpu = time.monotonic(), sum(os.times()[:4])
        folder = out / name
        weights = write_model(folder / "model", name, vae_steps)
        # What all seeds read; the LoRA's base changes no prompt and no image.
        first, second = configurations(folder, name, 0, steps)
        for config in (first, replace(second, model_paths=None)):
            with with_padding(name):
                run(replace(config, task="sft:data_process"))
        given = [(folder, name, seed, steps, each) for seed in range(seeds)]
        if seeds == 1:
            pairs = [judged(*given[0])]
        else:
            with ProcessPoolExecutor(seeds, get_context("spawn"), *ONE_THREAD) as pool:
                pairs = list(pool.map(judged, *zip(*given, strict=True)))
        cells = []
        for shares in zip(*pairs, strict=True):
            cells.append(f"{statistics.fmean(shares):.0f}")
            cells.append(f"{min(shares):.0f} to {max(shares):.0f}")
        for spent in (time.monotonic() - start, sum(os.times()[:4]) - cpu):
            cells.append(f"{spent / 60:.1f}")
        yield (name, f"{weights:.1f}", *cells)


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
