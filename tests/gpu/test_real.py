"""LoRA at toy sizes on real images and a real video, with the real tokenizers: the
loss on held-out noise falls. A folder of photos trains with one short command.

`make test-real` fetches what these tests need. They write what the trained pipelines
make to real_output/.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from dstrain import ModelConfig, Pipeline, SampleKey, TrainConfig, TrainingModule, run
from dstrain.cli.main import main
from dstrain.data import load_cell
from dstrain.data.images import convert
from dstrain.data.output import write_video
from dstrain.distributed import ProcessGroup
from dstrain.plugin import Frames
from dstrain.runs import open_training_data, prepare
from dstrain.runs.resolve import resolve
from PIL import Image
from safetensors.torch import load_file

from tests.gpu.material import write_edits, write_model, write_photos, write_videos

ASSETS = Path(os.environ.get("DSTRAIN_ASSETS", ".assets"))
OUTPUT = Path("real_output")
HELD_OUT_SEED = 10**6
DRAWS = 24


def models(folder: Path) -> list[list[str]]:
    """The weights of a model folder, one list per component."""
    found = [
        sorted(map(str, part.glob("*.safetensors")))
        for part in sorted(folder.iterdir())
        if part.is_dir()
    ]
    return [files for files in found if files]


def held_out_loss(config: TrainConfig) -> float:
    """The mean loss over noise and timesteps that no run with another seed draws."""
    setup, processes = resolve(config), ProcessGroup(Accelerator(cpu=True))
    training_run = prepare(setup, processes, open_training_data(setup), TrainingModule)
    losses = []
    with torch.no_grad():
        for row, chunk in training_run.order.sample_ids:
            sample = training_run.data.source.sample(row, chunk)
            for draw in range(DRAWS):
                losses.append(
                    training_run.module.losses(
                        [sample], [SampleKey(HELD_OUT_SEED, 0, draw, row, chunk)]
                    ).item()
                )
    return float(np.mean(losses))


def trained(config: TrainConfig, steps: int) -> tuple[float, float, Path]:
    """Run both stages; returns the held-out loss before and after, and the LoRA file."""
    run(TrainConfig(**{**vars(config), "task": "sft:data_process"}))
    train = {**vars(config), "task": "sft:train"}
    run(
        TrainConfig(
            **{**train, "max_steps": steps, "save_steps": steps, "dataset_repeat": 1000}
        )
    )
    assert config.output_path is not None
    lora = config.output_path / f"step-{steps}.safetensors"
    before = held_out_loss(
        TrainConfig(**{**train, "output_path": config.output_path / "before"})
    )
    after = held_out_loss(
        TrainConfig(
            **{
                **train,
                "output_path": config.output_path / "after",
                "lora_checkpoint": lora,
            }
        )
    )
    return before, after, lora


def settings(family: str, variant: str, folder: Path, **more: Any) -> TrainConfig:
    return TrainConfig(
        model=family,
        variant=variant,
        model_paths=json.dumps(models(folder / "model")),
        dataset_base_path=folder / "data",
        feature_cache=folder / "cache",
        output_path=folder / "out",
        lora_rank=8,
        learning_rate=5e-3,
        batch_size=4,
        loss_weighting="none",
        **more,
    )


def pipeline(family: str, variant: str, folder: Path, lora: Path) -> Pipeline:
    pipe = Pipeline.from_pretrained(
        family, [ModelConfig(path=files) for files in models(folder / "model")], variant
    )
    pipe.load_lora(lora)
    return pipe


def strip(images: list[Image.Image]) -> Image.Image:
    """Images side by side, 64 pixels each."""
    joined = Image.new("RGB", (64 * len(images), 64), "white")
    for i, image in enumerate(images):
        joined.paste(convert(image, "RGB").resize((64, 64)), (64 * i, 0))
    return joined


@pytest.mark.parametrize(
    ("family", "variant", "column", "options"),
    [
        ("qwen_image", "edit", "edit_image", {"edit_pixels": "4096"}),
        ("flux", "kontext", "kontext_images", {"kontext_pixels": "4096"}),
    ],
)
def test_a_lora_on_real_edits_lowers_the_held_out_loss(
    family: str, variant: str, column: str, options: dict[str, str], tmp_path: Path
) -> None:
    write_model(family, variant, tmp_path / "model", ASSETS)
    rows = write_edits(tmp_path / "data", ASSETS, column, 32)
    before, after, lora = trained(
        settings(family, variant, tmp_path, family_options=options), 200
    )
    print(f"{family} {variant}: held-out loss {before:.4f} before, {after:.4f} after")
    assert after < 0.9 * before
    pipe = pipeline(family, variant, tmp_path, lora)
    lines = []
    for row in rows[:4]:
        given = Image.open(tmp_path / "data" / row[column])
        asked: Any = [given] if column == "kontext_images" else given.convert("RGB")
        made = pipe(
            prompt=row["prompt"], height=64, width=64, num_inference_steps=20, seed=1, guidance_scale=1.0,
            **{column: asked, **{name: int(text) for name, text in options.items()}},
        )  # fmt: skip
        lines.append(strip([given, Image.open(tmp_path / "data" / row["image"]), made]))
    sheet = Image.new("RGB", (lines[0].width, 64 * len(lines)))
    for i, line in enumerate(lines):
        sheet.paste(line, (0, 64 * i))
    OUTPUT.mkdir(exist_ok=True)
    sheet.save(OUTPUT / f"{family}-{variant}.png")


@pytest.mark.parametrize("variant", ["t2v", "i2v"])
def test_a_lora_on_a_real_video_lowers_the_held_out_loss(
    variant: str, tmp_path: Path
) -> None:
    caption = "bicycles and traffic in the streets of a town"
    write_model("wan", variant, tmp_path / "model", ASSETS)
    write_videos(tmp_path / "data", ASSETS, caption)
    config = settings(
        "wan",
        variant,
        tmp_path,
        height=64,
        width=96,
        num_frames=17,
        frame_sampling="chunk",
    )
    before, after, lora = trained(config, 200)
    print(f"wan {variant}: held-out loss {before:.4f} before, {after:.4f} after")
    assert after < 0.9 * before
    first = resolve(config).dataset.rows[0]["input_video"]
    source: Frames = load_cell(first)
    image = (
        {"input_image": Image.fromarray(source.pixels[0].numpy())}
        if variant == "i2v"
        else {}
    )
    made = pipeline("wan", variant, tmp_path, lora)(
        prompt=caption, height=64, width=96, num_frames=17, num_inference_steps=20, seed=1, guidance_scale=1.0,
        **image,
    )  # fmt: skip
    assert made.pixels.shape == source.pixels.shape == (17, 64, 96, 3)
    OUTPUT.mkdir(exist_ok=True)
    write_video(source, OUTPUT / "wan-source.mp4")
    write_video(made, OUTPUT / f"wan-{variant}.mp4")


PHOTOS = 20
MODEL = "--model qwen_image --toy"
SHORT = (
    "dstrain --dataset_base_path photos --output_path one",
    "dstrain --dataset_base_path photos --output_path two --feature_cache cache",
)
BUCKETS = "dstrain --dataset_base_path photos --output_path buckets --resolution 64 --batch_size 4"


def test_a_folder_of_photos_trains_with_one_short_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = write_photos(tmp_path / "photos", ASSETS, PHOTOS)
    assert len(sizes) > PHOTOS // 2
    monkeypatch.chdir(tmp_path)
    for command in (*SHORT, BUCKETS):
        assert main([*command.split()[1:], *MODEL.split()]) == 0
    assert max(map(len, SHORT)) <= 80
    once, cached = (load_file(f"{name}/epoch-0.safetensors") for name in ("one", "two"))
    assert once.keys() == cached.keys()
    assert all(torch.equal(once[key], cached[key]) for key in once)
    steps = Path("buckets/logs/loss.csv").read_text().splitlines()[1:]
    assert len(steps) == PHOTOS // 4
