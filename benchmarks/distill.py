"""Distillation of the demo's model: how far images of two steps end from those of
thirty, before and after, by each of the tasks.

A LoRA learns in two stages from images, or from the latents on the way to them, that
`dstrain generate --dataset` makes in thirty steps; every command is printed and can be
typed by hand. Measured on seeds that are not among these: the mean square distance, per
number of the latents, to what the model makes of the same noise in thirty steps.
`right` is the share of images that the demo's judge reads as the digit asked for. Needs
what `make demo` leaves in demo_output; the images made are kept for the next run.
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
TASKS = ("direct_distill", "trajectory_imitation")


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
    """Make the teacher's images and paths, then train a student by each task in two
    stages.
    """
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
        "--trajectory",
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
    ]
    students = []
    for task in TASKS:
        output = ["--output_path", str(PLACE / task)]
        cache = ["--feature_cache", str(PLACE / f"cache of {task}")]
        for stage in ("data_process", "train"):
            words = ["train", "--task", f"{task}:{stage}", *train, *cache, *output]
            students.append(words)
    return [make, *students]


def pipeline() -> Pipeline:
    """Return the demo's model."""
    models = [ModelConfig(path) for path in model_files()]
    return Pipeline.from_pretrained("qwen_image", models, variant="base")


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
    for task in TASKS:
        shutil.rmtree(PLACE / task, ignore_errors=True)
    write_prompts(PLACE / "prompts.csv")
    for words in commands():
        print("\n$ " + shlex.join(["dstrain", *words]), flush=True)
        if dstrain(words):
            raise click.ClickException("the command failed")
    drawn = {
        f"{steps} steps, not distilled": draw(pipeline(), steps)
        for steps in (TEACHER_STEPS, 4, STUDENT_STEPS)
    }
    for task in TASKS:
        student = pipeline()
        student.load_lora(PLACE / task / f"step-{TRAINING_STEPS}.safetensors")
        drawn[f"{STUDENT_STEPS} steps, {task}"] = draw(student, STUDENT_STEPS)
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
    before, *after = (float(row[1]) for row in rows[-1 - len(TASKS) :])
    for task, distance in zip(TASKS, after, strict=True):
        share = 1 - distance / before
        print(f"{task} wins back {share:.0%} of what {STUDENT_STEPS} steps lose")


if __name__ == "__main__":
    main()
