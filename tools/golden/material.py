"""The files that cases work with: a dataset with every column that a variant reads, smaller
datasets for single options, and files that are damaged.
"""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZES = ((64, 64), (96, 64), (64, 96), (64, 64), (96, 64), (80, 80))
"""Width and height of what is in each row."""
CAPTIONS = ("a dog", "", "two dogs, a bridge, rain", "a cat", "a cat, night", "a fox")
IMAGES = (
    "image", "edit_image", "kontext_images", "flux_fill_image", "controlnet_image",
    "flux_redux_image", "ipadapter_images", "blockwise_controlnet_image",
    "context_image", "layer_input_image", "reference_image", "vace_reference_image",
)  # fmt: skip
MASKS = (
    "mask", "flux_fill_mask", "controlnet_inpaint_mask", "inpaint_mask",
    "blockwise_controlnet_inpaint_mask",
)  # fmt: skip
VIDEOS = ("video", "control_video", "vace_video", "vace_video_mask")
FRAMES = 9


def write_material(folder: Path) -> None:
    """Write `usual`, which most cases begin with, and `pages`."""
    usual, pages = folder / "usual", folder / "pages"
    data, bad = usual / "data", usual / "bad"
    for place in (data, bad):
        place.mkdir(parents=True)
    rows = [write_row(data, number) for number in range(len(SIZES))]
    (data / "metadata.json").write_text(json.dumps(rows, indent=1), "utf-8")
    for name, column in ("more", "image"), ("more-videos", "video"):
        (usual / name).mkdir()
        for row in rows[:2]:
            copy = usual / name / row[column]
            copy.write_bytes((data / row[column]).read_bytes())
            copy.with_suffix(".txt").write_text("a bird", "utf-8")
    table = "prompt,seed,num_inference_steps\na dog,1,2\na cat,2,2\n"
    (usual / "prompts.csv").write_text(table, "utf-8")
    (bad / "cut.png").write_bytes((data / rows[0]["image"]).read_bytes()[:999])
    (bad / "empty.safetensors").touch()
    example = pages / "data/example_image_dataset"
    example.mkdir(parents=True)
    for number in (1, 2):
        Image.fromarray(noise(number, 64, 64)).save(example / f"image_{number}.jpg")
    table = "image,prompt\nimage_1.jpg,a dog\nimage_2.jpg,a cat\n"
    (example / "metadata.csv").write_text(table, "utf-8")


def write_row(folder: Path, number: int) -> dict[str, Any]:
    """Write the files of a row; return its cells."""
    width, height = SIZES[number]
    row: dict[str, Any] = {"prompt": CAPTIONS[number], "motion_bucket_id": 10 * number}
    for seed, name in enumerate((*IMAGES, *MASKS)):
        row[name] = f"{number}-{name}.png"
        pixels = noise(100 * number + seed, height, width)
        if name in MASKS:
            pixels = np.zeros((height, width), np.uint8)
            pixels[:, : width * (seed % 3 + 1) // 4] = 255
        Image.fromarray(pixels).save(folder / row[name])
    for seed, name in enumerate(VIDEOS):
        row[name] = f"{number}-{name}.mp4"
        write_video(folder / row[name], 10 * number + seed, width, height)
    is_odd = number % 2
    several = [row["image"], row["edit_image"], row["context_image"]]
    return row | {
        "layers": several[: 2 + is_odd],
        "layer_num": 1 + is_odd,
        "edit_images": several[: 1 + is_odd],
        "eligen_entity_prompts": ["a dog", "a cat"],
        "eligen_entity_masks": [row["mask"], row["inpaint_mask"]],
        "controlnet_processor_id": ("canny", "depth")[is_odd],
        "camera_control_direction": ("Left", "RightUp")[is_odd],
        "camera_control_speed": 0.02,
    }


def noise(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return squares of 4 x 4 pixels of random colours: (height, width, 3)."""
    draw = np.random.default_rng(seed)
    colors = draw.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    return colors.repeat(4, axis=0).repeat(4, axis=1)


def write_video(path: Path, seed: int, width: int, height: int) -> None:
    """Write frames of noise, 16 a second."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(FRAMES):
            pixels = noise(1000 * seed + number, height, width)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        file.mux(stream.encode())
