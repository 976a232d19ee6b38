"""Units give what diffusers' pipelines give, for one sample, from plain values."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanVACEPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from dstrain import Frames
from dstrain.graph import LongPrompt, noticing_long_prompts
from dstrain.plugin import InputError
from PIL import Image
from torch.nn.functional import interpolate
from transformers import CLIPImageProcessorPil

from tests.support.noise_images import noise_image
from tests.support.toys import opened, run_unit

SIZE = {"num_frames": 9, "height": 32, "width": 48}
TEXTS = {
    "plain": "a red dog runs",
    "blank": "",
    "escapes": "  a\n\t b  &amp;lt;i&amp;gt;",
    "too long": "a dog " * 400,
    "unknown letters": "红苹果 🙂",
}
IMAGE = noise_image(9, 7).resize((72, 56), Image.Resampling.BICUBIC)
"""An image none of whose sides is a multiple of 16."""


def video(frames: int = 9, height: int = 32, width: int = 48, seed: int = 0) -> Frames:
    noise = np.random.default_rng(seed)
    pixels = noise.integers(0, 256, (frames, height, width, 3), np.uint8)
    return Frames(torch.from_numpy(pixels), 16.0)


def as_images(frames: Frames | None) -> list[Image.Image] | None:
    if frames is None:
        return None
    return [Image.fromarray(one.numpy()) for one in frames.pixels]


@torch.no_grad()
@pytest.mark.parametrize("text", TEXTS)
def test_prompt_embeddings_are_those_of_diffusers_up_to_their_true_length(
    text: str,
) -> None:
    pipe, prompt = opened("wan", "t2v"), TEXTS[text]
    too_long: list[LongPrompt] = []
    with noticing_long_prompts(too_long.append):
        made = run_unit(pipe, "encode_prompt", prompt=prompt)["prompt_emb"]
    names = ("text_encoder", "tokenizer", "vae")
    parts = {name: pipe.components[name] for name in names}
    published = WanPipeline(**parts, scheduler=None)
    wanted, _ = published.encode_prompt(prompt, None, False, max_sequence_length=512)
    length = min(len(parts["tokenizer"](prompt_clean(prompt)).input_ids), 512)
    assert made.shape == (1, length, 32)
    assert [one.limit for one in too_long] == ([511] if text == "too long" else [])
    assert torch.equal(made, wanted[:, :length])
    assert not wanted[:, length:].any()
    assert made.untyped_storage().nbytes() == made.numel() * 4


@torch.no_grad()
@pytest.mark.parametrize("size", [(48, 32), (72, 56), (28, 28), (16, 160)])
def test_the_image_encoder_sees_the_whole_image_squeezed(size: tuple[int, int]) -> None:
    image = IMAGE.resize(size)
    # Written out: from -1..1 as the VAE gets it, colour by colour.
    pixels = torch.tensor(np.array(image)) / 127.5 - 1
    published = CLIPImageProcessorPil()
    colours = []
    for number, (mean, std) in enumerate(
        zip(published.image_mean, published.image_std, strict=True)
    ):
        squeezed = interpolate(
            pixels[None, None, ..., number], (28, 28), mode="bicubic"
        )
        colours.append((squeezed / 2 + 0.5 - mean) / std)
    exact: dict[str, Any] = {"width": size[0], "height": size[1]}
    for variant, unit, given in (
        ("i2v", "encode_clip", {"input_image": image}),
        ("flf2v", "encode_clip_of_ends", {"input_image": image, "end_image": image}),
        ("fun-control", "encode_squeezed_clip", {"input_image": image, **exact}),
        ("fun-control-ref", "encode_clip_of_reference", {"reference_image": image, **exact}),
    ):  # fmt: skip
        pipe = opened("wan", variant)
        encoder = pipe.components["image_encoder"]
        seen = encoder(torch.cat(colours, dim=1), output_hidden_states=True)
        made = run_unit(pipe, unit, **given)["clip_feature"]
        for one in made.split(5, dim=1):
            assert (one - seen.hidden_states[-2]).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "unit", "name"),
    [
        ("fun-control", "encode_control", "control_video"),
        ("vace", "encode_conditions", "vace_video"),
    ],
)
def test_a_conditioning_video_is_cut_and_resized_and_a_shorter_one_refused(
    variant: str, unit: str, name: str
) -> None:
    pipe = opened("wan", variant)
    longer = video(11, 64, 96)
    fitted = [
        one.resize((48, 32), Image.Resampling.LANCZOS) for one in as_images(longer)[:9]
    ]
    wanted = Frames(torch.from_numpy(np.stack(fitted)), 16.0)
    one, other = (
        run_unit(pipe, unit, **SIZE, **{name: shown}) for shown in (longer, wanted)
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
    with pytest.raises(InputError, match=f"{name}: .* 5, .* 9"):
        run_unit(pipe, unit, **SIZE, **{name: video(5)})


@torch.no_grad()
@pytest.mark.parametrize(
    ("shown", "mask", "size"),
    [
        (None, None, None),
        (video(), None, (48, 32)),
        (video(), video(seed=1), (31, 97)),
        (None, None, (80, 24)),
    ],
    ids=["nothing", "video and reference", "with a mask", "reference alone"],
)
def test_conditions_of_vace_are_those_of_diffusers(
    shown: Frames | None, mask: Frames | None, size: tuple[int, int] | None
) -> None:
    pipe = opened("wan", "vace")
    reference = None if size is None else IMAGE.resize(size)
    made = run_unit(
        pipe,
        "encode_conditions",
        **SIZE,
        vace_video=shown,
        vace_video_mask=mask,
        vace_reference_image=reference,
    )["vace_context"]
    theirs = WanVACEPipeline(
        vae=pipe.components["vae"],
        transformer=pipe.components["dit"],
        **dict.fromkeys(("tokenizer", "text_encoder", "scheduler")),
    )
    prepared = theirs.preprocess_conditions(
        as_images(shown), as_images(mask), reference, **SIZE, dtype=torch.float32
    )
    latents = theirs.prepare_video_latents(*prepared)
    wanted = torch.cat([latents, theirs.prepare_masks(*prepared[1:])], dim=1)
    assert made.shape == wanted.shape == (1, 96, 3 + (size is not None), 4, 6)
    assert (made - wanted).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("direction", "row", "sign"),
    [("Left", 0, -1), ("Right", 0, 1), ("Up", 1, -1), ("Down", 1, 1)],
)
def test_the_camera_moves_on_at_one_speed(direction: str, row: int, sign: int) -> None:
    pipe = opened("wan", "fun-camera")
    given: dict[str, Any] = {"num_frames": 5, "height": 720, "width": 1280}
    given["camera_control_direction"] = direction
    made = run_unit(pipe, "encode_camera", **given, camera_control_speed=0.5)["camera"]
    assert made.shape == (1, 5, 16)
    # At the aspect ratio of the published camera its focal lengths are as they were.
    focal = torch.tensor([0.532139961 * 1280, 0.946026558 * 720, 640.0, 360.0])
    assert torch.allclose(made[0, :, :4], focal.expand(5, 4))
    matrices = made[0, :, 4:].view(5, 3, 4)
    assert torch.allclose(matrices[:, row, 2], sign * 0.5 * torch.arange(5.0))
    matrices[:, row, 2] = 0
    assert torch.equal(matrices, torch.eye(4)[:3].expand(5, 3, 4))
    slow = run_unit(pipe, "encode_camera", **given)["camera"]
    moved = slow[0, 4, 4:].view(3, 4)[row, 2].item()
    assert moved == pytest.approx(sign * 4 / 54)


@torch.no_grad()
@pytest.mark.parametrize(
    ("height", "width", "focal"),
    [
        (32, 48, (0.532139961 * 32 * 1280 / 720, 0.946026558 * 32)),
        (32, 96, (0.532139961 * 96, 0.946026558 * 96 * 720 / 1280)),
    ],
    ids=["higher", "wider"],
)
def test_rays_are_where_a_pixel_looks(
    height: int, width: int, focal: tuple[float, float]
) -> None:
    pipe = opened("wan", "fun-camera")
    camera = run_unit(
        pipe,
        "encode_camera",
        num_frames=5,
        height=height,
        width=width,
        camera_control_direction="LeftUp",
        camera_control_speed=0.1,
    )["camera"]
    seen: list[torch.Tensor] = []
    pipe.components["dit"].control_adapter.register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    latents = torch.zeros(1, 16, 2, height // 8, width // 8)
    values = {
        "prompt_emb": torch.zeros(1, 3, 32),
        "first_latents": latents[:, :, :1],
        "clip_feature": torch.zeros(1, 5, 16),
        "camera": camera,
    }
    pipe.predict(values, latents, torch.tensor([500.0]))
    (rays,) = seen
    assert rays.shape == (1, 24, 2, height, width)
    # channel = 4 * coordinate + frame of the latent frame; the first frame fills one.
    coordinates = rays[0].unflatten(0, (6, 4))
    assert torch.equal(coordinates[:, 0, 0], coordinates[:, 3, 0])
    x, y = 5, 17
    looks = [(x + 0.5 - width / 2) / focal[0], (y + 0.5 - height / 2) / focal[1], 1.0]
    direction = np.array(looks) / np.linalg.norm(looks)
    # Frame 3 is the third of the second latent frame; it moves against the camera.
    sheared = direction + direction[2] * np.array([-0.3, -0.3, 0])
    found = coordinates[:, 2, 1, y, x].numpy()
    assert np.abs(found[3:] - sheared).max() <= 1e-6
    assert not found[:3].any()
