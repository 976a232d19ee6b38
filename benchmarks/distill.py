"""Distillation of the demo's model: how far images of two steps end from those of
thirty, before and after.

A LoRA learns in two stages from images that `dstrain generate --dataset` makes in
thirty steps; every command is printed and can be typed by hand. Measured on seeds that
are not among these: the mean square distance, per number of the latents, to what the
model makes of the same noise in thirty steps. `right` is the share of images that the
demo's judge reads as the digit asked for. Needs what `make demo` leaves in demo_output;
the images made are kept for the next run.
"""

import csv
import json
import shlex
import shutil
import sys
from pathlib import Path

import click
import torch
from dstrain import ModelConfig, Pipeline
from dstrain.cli.main import main as dstrain
from PIL import Image
from report import table
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "demo"))
from digits import NAMES, SIZE, Judge

DEMO = Path("demo_output")
PLACE = DEMO / "distill"
TEACHER_STEPS, STUDENT_STEPS = 30, 2
ROWS, HELD_OUT = 192, 50
FIRST_HELD_OUT = 10_000
"""The least seed that is measured; rows have seeds below it."""
TRAINING_STEPS, BATCH = 120, 16


def model_files() -> list[str]:
    """Return the demo's trained denoiser and its encoders."""
    trained = sorted(
        DEMO.glob("full/step-*.safetensors"),
        key=lambda path: int(path.stem.partition("-")[2]),
    )
    if not trained:
        raise click.ClickException(f"{DEMO}/full has no trained model; run: make demo")
    encoders = [
        path
        for name in ("text_encoder", "vae")
        for path in DEMO.glob(f"model/{name}/*.safetensors")
    ]
    return [str(path) for path in (trained[-1], *encoders)]


def write_prompts(path: Path) -> None:
    """Write the table whose rows are distilled: every digit in turn, each row with a
    seed of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ("prompt", "seed", "rand_device", "num_inference_steps", "cfg_scale")
        )
        rows.writerows(
            (prompt(seed), seed, "cpu", STUDENT_STEPS, 1) for seed in range(ROWS)
        )


def prompt(seed: int) -> str:
    """Return the prompt of a seed's image."""
    return f"a picture of the number {NAMES[seed % 10]}"


def commands() -> list[list[str]]:
    """Make the teacher's images, then train the student on them in two stages."""
    model = [
        "--model",
        "qwen_image",
        "--variant",
        "base",
        "--model_paths",
        json.dumps(model_files()),
    ]
    make = [
        "generate",
        *model,
        "--dataset",
        str(PLACE / "prompts.csv"),
        "--num_inference_steps",
        str(TEACHER_STEPS),
        "--guidance_scale",
        "1",
        "--height",
        str(SIZE),
        "--width",
        str(SIZE),
        "--output",
        str(PLACE / "teacher"),
    ]
    train = [
        *model,
        "--dataset_base_path",
        str(PLACE / "teacher"),
        "--feature_cache",
        str(PLACE / "cache"),
        "--lora_base_model",
        "dit",
        "--lora_rank",
        "16",
        "--learning_rate",
        "2e-3",
        "--batch_size",
        str(BATCH),
        "--lr_scheduler",
        "cosine",
        "--lr_warmup_steps",
        "10",
        "--max_steps",
        str(TRAINING_STEPS),
        "--save_steps",
        str(TRAINING_STEPS),
        "--output_path",
        str(PLACE / "student"),
    ]
    return [
        make,
        *(
            ["train", "--task", f"direct_distill:{stage}", *train]
            for stage in ("data_process", "train")
        ),
    ]


def draw(pipe: Pipeline, steps: int) -> tuple[Tensor, list[Image.Image]]:
    """Return the held-out seeds' final latents, (seeds, 16, 1, height / 8, width / 8),
    and their images.
    """
    seen: list[Tensor] = []
    settings = {
        "height": SIZE,
        "width": SIZE,
        "num_inference_steps": steps,
        "guidance_scale": 1.0,
    }
    seeds = range(FIRST_HELD_OUT, FIRST_HELD_OUT + HELD_OUT)
    images = [
        pipe(prompt=prompt(s), seed=s, on_step=lambda _, x: seen.append(x), **settings)
        for s in seeds
    ]
    return torch.cat(seen[steps - 1 :: steps]), images


@click.command(help=__doc__)
def main() -> None:
    """Distil, and print a table."""
    shutil.rmtree(PLACE / "student", ignore_errors=True)
    write_prompts(PLACE / "prompts.csv")
    for words in commands():
        print("\n$ " + shlex.join(["dstrain", *words]), flush=True)
        if dstrain(words):
            raise click.ClickException("the command failed")
    pipe = Pipeline.from_pretrained(
        "qwen_image", [ModelConfig(path) for path in model_files()], variant="base"
    )
    drawn = {
        f"{steps} steps, not distilled": draw(pipe, steps)
        for steps in (TEACHER_STEPS, 4, STUDENT_STEPS)
    }
    pipe.load_lora(PLACE / f"student/step-{TRAINING_STEPS}.safetensors")
    drawn[f"{STUDENT_STEPS} steps, distilled"] = draw(pipe, STUDENT_STEPS)
    teacher, _ = next(iter(drawn.values()))
    judge, digits = (
        Judge(),
        [seed % 10 for seed in range(FIRST_HELD_OUT, FIRST_HELD_OUT + HELD_OUT)],
    )
    rows = []
    for name, (latents, images) in drawn.items():
        distance = (latents - teacher).square().mean().item()
        rows.append((name, f"{distance:.4f}", f"{judge.accuracy(images, digits):.2f}"))
    print(
        table(
            (
                f"{HELD_OUT} held-out seeds",
                f"distance to {TEACHER_STEPS} steps",
                "right",
            ),
            rows,
        )
    )
    before, after = (float(row[1]) for row in rows[-2:])
    print(f"won back: {1 - after / before:.0%} of what {STUDENT_STEPS} steps lose")


if __name__ == "__main__":
    main()
