"""Make the images of docs/guide/first-lora.md from what `make demo` has trained.

`python docs/images/make_images.py [FOLDER]`, from the project's folder and after `make
demo`: about three minutes on two cores. It trains the demo's LoRA again, saving every
50 steps, and writes the images to FOLDER, by default docs/images.
"""

import csv
import json
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from dstrain import ModelConfig, Pipeline
from dstrain.data.buckets import Buckets, cropped_share
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parents[2]
DEMO = Path("demo_output")
WALK = DEMO / "walk"
SIDE = 64
"""Height and width of the demo's images, in pixels."""
ZOOM = 2
GAP = 8
LINE = 18
"""Pixels of a line of text."""
STEPS = 250
SAVE_STEPS = 50
LOOK = ", red ink on yellow paper"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHOTOS = {"6000 x 4000": (4000, 6000), "4032 x 3024": (3024, 4032), "3000 x 3000": (3000, 3000),
          "1080 x 1920": (1920, 1080), "6000 x 1200": (1200, 6000)}  # fmt: skip
"""Sizes that cameras and phones give, as width x height and as (height, width)."""


def dataset(rows: Sequence[Mapping[str, str]]) -> Image.Image:
    """Show images of the dataset, each above its caption."""
    captions = [[row["prompt"].partition(",")[0], LOOK[2:]] for row in rows]
    images = [Image.open(DEMO / "look" / row["image"]) for row in rows]
    return sheet([images], captions)


def cached(rows: Sequence[Mapping[str, str]], pipe: Pipeline) -> Image.Image:
    """Show images as they are, and what is left of them in the latents."""
    originals = [Image.open(DEMO / "look" / row["image"]) for row in rows]
    return sheet([originals, [through_the_vae(one, pipe) for one in originals]])


def through_the_vae(image: Image.Image, pipe: Pipeline) -> Image.Image:
    """Encode and decode an image."""
    import torch

    vae = pipe.components["vae"]
    pixels = torch.from_numpy(np.asarray(image.convert("RGB")) / 127.5 - 1).float()
    video = pixels.permute(2, 0, 1)[None, :, None]
    with torch.no_grad():
        decoded = vae.decode(vae.encode(video).latent_dist.mode()).sample[0, :, 0]
    values = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())


def sheet(
    rows: Sequence[Sequence[Image.Image]], captions: Sequence[Sequence[str]] = ()
) -> Image.Image:
    """Return images in rows, enlarged, with lines of text below each column."""
    font = ImageFont.load_default(12)
    side = SIDE * ZOOM
    wide = max(
        [side] + [int(font.getlength(line)) for lines in captions for line in lines]
    )
    lines = max(map(len, captions), default=0)
    size = (
        len(rows[0]) * (wide + GAP) + GAP,
        len(rows) * (side + GAP) + GAP + lines * LINE,
    )
    page = Image.new("RGB", size, "white")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            large = image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
            left = GAP + x * (wide + GAP) + (wide - side) // 2
            page.paste(large, (left, GAP + y * (side + GAP)))
    pen = ImageDraw.Draw(page)
    for x, column in enumerate(captions):
        for number, line in enumerate(column):
            middle = GAP + x * (wide + GAP) + wide / 2
            down = GAP + len(rows) * (side + GAP) + number * LINE
            pen.text((middle, down), line, fill="black", font=font, anchor="mt")
    return page


def buckets(resolution: int = 1024, multiple: int = 16) -> str:
    """Draw photos of five sizes, what a bucket keeps of each, and the size it gets."""
    width, most = 140, 120
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(PHOTOS)} 190" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        f'<rect width="{width * len(PHOTOS)}" height="190" fill="white"/>',
    ]
    for number, (name, size) in enumerate(PHOTOS.items()):
        bucket = Buckets(resolution).fit(size, multiple)
        scale = most / max(size)
        height, across = size[0] * scale, size[1] * scale
        cover = max(bucket[0] / size[0], bucket[1] / size[1])
        kept = (bucket[0] / cover * scale, bucket[1] / cover * scale)
        x, y = width * (number + 0.5), 10 + most / 2
        for (tall, broad), style in (
            ((height, across), 'fill="#f4b6a6" stroke="none"'),
            (kept, 'fill="#b9d4ea" stroke="#1b6ca8" stroke-width="2"'),
        ):
            parts.append(
                f'<rect x="{x - broad / 2:.1f}" y="{y - tall / 2:.1f}" '
                f'width="{broad:.1f}" height="{tall:.1f}" {style}/>'
            )
        lost = 100 * cropped_share(size, bucket)
        for line, words in enumerate(
            (name, f"→ {bucket[1]} x {bucket[0]}", f"{lost:.1f} % cut off")
        ):
            parts.append(f'<text x="{x:.1f}" y="{150 + 16 * line}">{words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def loss_curve(losses: Sequence[float], window: int = 20) -> str:
    """Draw the loss of each step, and the mean of the last `window` steps."""
    width, height, margin = 640, 260, 40
    top = float(np.quantile(losses, 0.99)) * 1.2
    means = [float(np.mean(losses[max(0, i - window) : i])) for i in range(1, len(losses) + 1)]  # fmt: skip

    def path(values: Sequence[float]) -> str:
        points = []
        for number, value in enumerate(values):
            x = margin + number / (len(values) - 1) * (width - 2 * margin)
            y = height - margin - min(value / top, 1) * (height - 2 * margin)
            points.append(f"{x:.1f} {y:.1f}")
        return "M" + " L".join(points)

    right, down = width - margin, height - margin
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{margin} {margin}V{down}H{right}" fill="none" stroke="#999999"/>',
        f'<text x="{margin}" y="{margin - 12}">loss</text>',
        f'<text x="{margin - 6}" y="{down}" text-anchor="end">0</text>',
        f'<text x="{margin - 6}" y="{margin + 4}" text-anchor="end">{top:.1f}</text>',
        f'<text x="{margin}" y="{down + 18}">step 1</text>',
        f'<text x="{right}" y="{down + 18}" text-anchor="end">step {len(losses)}</text>',
        f'<path d="{path(losses)}" fill="none" stroke="#b9d4ea"/>',
        f'<path d="{path(means)}" fill="none" stroke="#1b6ca8" stroke-width="2"/>',
        f'<text x="{right}" y="{margin}" text-anchor="end" fill="#6d93b3">each step</text>',
        f'<text x="{right}" y="{margin + 16}" text-anchor="end" fill="#1b6ca8">mean of {window} steps</text>',
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def model_files() -> list[str]:
    """Return the demo's model, with the denoiser that `make demo` trained."""
    full = max((DEMO / "full").glob("step-*.safetensors"), key=lambda one: one.name)
    return [
        str(full),
        str(DEMO / "model/text_encoder/model.safetensors"),
        str(DEMO / "model/vae/diffusion_pytorch_model.safetensors"),
    ]


def train() -> None:
    """Train the demo's LoRA as `make demo` does, but save it every 50 steps."""
    flags = {
        "--model": "qwen_image",
        "--model_paths": json.dumps(model_files()),
        "--dataset_base_path": str(DEMO / "look"),
        "--feature_cache": str(DEMO / "cache"),
        "--lora_base_model": "dit",
        "--lora_rank": "16",
        "--learning_rate": "2e-3",
        "--batch_size": "32",
        "--loss_weighting": "none",
        "--max_steps": str(STEPS),
        "--save_steps": str(SAVE_STEPS),
        "--output_path": str(WALK),
    }
    program = Path(sysconfig.get_path("scripts")) / "dstrain"
    words = [word for pair in flags.items() for word in pair]
    done = subprocess.run([str(program), *words, "--overwrite"])
    if done.returncode:
        sys.exit(done.returncode)


def pipeline(step: int = 0, scale: float = 1.0) -> Pipeline:
    """Return the demo's pipeline, with the LoRA as it was after a step."""
    files = [ModelConfig(one) for one in model_files()]
    pipe = Pipeline.from_pretrained("qwen_image", files, "base")
    if step:
        pipe.load_lora(WALK / f"step-{step}.safetensors", scale)
    return pipe


def digits(
    pipe: Pipeline, which: Sequence[int], words: str = LOOK
) -> list[Image.Image]:
    """Generate digits: of one digit always from the same noise."""
    return [
        pipe(
            prompt=f"a picture of the number {NAMES[digit]}{words}",
            height=SIDE,
            width=SIDE,
            num_inference_steps=20,
            guidance_scale=1.0,
            seed=100 * digit,
        )
        for digit in which
    ]


def write(path: Path, image: Image.Image) -> None:
    """Write an image in few colours, so that the file is small."""
    colors = image.quantize(256)
    dithered = image.quantize(palette=colors, dither=Image.Dither.FLOYDSTEINBERG)
    dithered.save(path, optimize=True)


def columns(
    images: Sequence[Sequence[Image.Image]], names: Sequence[str]
) -> Image.Image:
    """Return a column for each group of images, with its name below."""
    rows = list(zip(*images, strict=True))
    return sheet(rows, [[name] for name in names])


@click.command()
@click.argument(
    "folder", type=click.Path(path_type=Path), default=Path(__file__).parent
)
def main(folder: Path) -> None:
    """Train, generate, and write the images to FOLDER."""
    if not (WALK / f"step-{STEPS}.safetensors").exists():
        train()
    with (DEMO / "look/metadata.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:5]
    with (WALK / "logs/loss.csv").open(encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    (folder / "loss.svg").write_text(loss_curve(losses), encoding="utf-8")
    (folder / "buckets.svg").write_text(buckets(), encoding="utf-8")
    write(folder / "dataset.png", dataset(rows))
    write(folder / "cache.png", cached(rows, pipeline()))
    each, some = (0, 2, 4, 5, 6), (4, 5)
    before = digits(pipeline(), each, words="")
    after = digits(pipeline(STEPS), each)
    write(folder / "before-after.png", sheet([before, after]))
    saved = range(0, STEPS + 1, SAVE_STEPS)
    by_step = [digits(pipeline(step), some) for step in saved]
    names = [f"{step} steps" for step in saved]
    write(folder / "steps.png", columns(by_step, names))
    scales = (0.0, 0.5, 1.0, 1.5, 2.0)
    by_scale = [digits(pipeline(STEPS, scale), some) for scale in scales]
    names = [f"scale {scale:g}" for scale in scales]
    write(folder / "scales.png", columns(by_scale, names))


if __name__ == "__main__":
    main()
