"""Units give what diffusers' pipelines give, for one sample, from plain values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import WanPipeline, prompt_clean
from diffusers.video_processor import VideoProcessor
from dstrain import Frames
from dstrain.plugin import InputError, Unit
from dstrain_wan import units
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil

PROMPT, VIDEO, CLIP = (
    Unit(unit) for unit in (units.encode_prompt, units.encode_video, units.encode_clip)
)
ENDS = Unit(units.encode_clip_of_ends)
FIRST, FIRST_FRAME = Unit(units.encode_first), Unit(units.encode_first_frame)


def video(frames: int, height: int, width: int, fps: float = 16.0) -> Frames:
    pixels = torch.randint(
        0, 256, (frames, height, width, 3), generator=torch.Generator().manual_seed(0)
    )
    return Frames(pixels.to(torch.uint8), fps)


def to_minus_one_one(frames: Frames) -> Tensor:
    return VideoProcessor(vae_scale_factor=8).preprocess_video(
        frames.pixels.numpy()[None].astype(np.float32) / 255
    )


def normalized(vae: Any, pixels: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (vae.encode(pixels).latent_dist.mode() - mean) * (1 / std)


TEXTS = [
    "a red dog runs",
    "",
    "  a\n\t b  &amp;lt;i&amp;gt;",
    "a dog " * 400,
    "红苹果 🙂",
]


@torch.no_grad()
@pytest.mark.parametrize(
    "prompt", TEXTS, ids=["plain", "blank", "escapes", "too long", "unknown letters"]
)
def test_prompt_embeddings_are_those_of_diffusers_up_to_their_true_length(
    prompt: str, bind_components: Callable[..., dict[str, Any]]
) -> None:
    loaded = bind_components("t2v")
    made = PROMPT.run({"prompt": prompt}, loaded)["prompt_emb"]
    parts = {name: loaded[name] for name in ("text_encoder", "tokenizer", "vae")}
    wanted, _ = WanPipeline(**parts, scheduler=None).encode_prompt(
        prompt, None, False, max_sequence_length=512
    )
    length = min(len(loaded["tokenizer"](prompt_clean(prompt)).input_ids), 512)
    assert made.shape == (1, length, 32)
    assert torch.equal(made, wanted[:, :length])
    assert not wanted[:, length:].any()
    assert made.untyped_storage().nbytes() == made.numel() * 4


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "shape"), [("t2v", (1, 16, 3, 4, 6)), ("ti2v-5b", (1, 48, 3, 2, 3))]
)
def test_a_video_is_encoded_as_the_normalized_mode(
    variant: str, shape: tuple[int, ...], bind_components: Callable[..., dict[str, Any]]
) -> None:
    vae = bind_components(variant)["vae"]
    vae.register_to_config(
        latents_mean=list(range(shape[1])), latents_std=list(range(1, shape[1] + 1))
    )
    frames = video(9, 32, 48)
    made = VIDEO.run({"input_video": frames}, {"vae": vae})["input_latents"]
    assert made.shape == shape
    assert torch.equal(made, normalized(vae, to_minus_one_one(frames)))


@torch.no_grad()
def test_a_single_frame_is_a_video_too(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    assert VIDEO.run({"input_video": video(1, 32, 32)}, bind_components("t2v"))[
        "input_latents"
    ].shape == (1, 16, 1, 4, 4)


@torch.no_grad()
@pytest.mark.parametrize(
    "size", [(72, 56), (56, 72), (28, 28), (29, 97), (20, 31), (640, 352)]
)
def test_the_image_encoder_sees_what_clips_processor_makes(
    size: tuple[int, int],
    bind_components: Callable[..., dict[str, Any]],
    image: Image.Image,
) -> None:
    encoder = bind_components("i2v")["image_encoder"]
    resized = image.resize(size)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)(
        resized, return_tensors="pt"
    )
    wanted = encoder(**pixels, output_hidden_states=True).hidden_states[-2]
    made = CLIP.run({"input_image": resized}, {"image_encoder": encoder})[
        "clip_feature"
    ]
    assert made.shape == (1, 5, 16)
    assert (made - wanted).abs().max() <= 1e-6
    assert torch.equal(
        torch.tensor(units.CLIP_MEAN + units.CLIP_STD), _published_statistics()
    )


def _published_statistics() -> Tensor:
    processor = CLIPImageProcessorPil()
    return torch.tensor([*processor.image_mean, *processor.image_std])


@torch.no_grad()
def test_the_first_frame_is_known_and_grey_follows(
    bind_components: Callable[..., dict[str, Any]], image: Image.Image
) -> None:
    vae = bind_components("i2v")["vae"]
    made = FIRST.run(
        {"input_image": image, "num_frames": 9, "height": 32, "width": 48},
        {"vae": vae},
    )["y"]
    first = VideoProcessor(vae_scale_factor=8).preprocess(image, height=32, width=48)[
        :, :, None
    ]
    wanted = normalized(vae, torch.cat([first, torch.zeros(1, 3, 8, 32, 48)], dim=2))
    assert made.shape == (1, 20, 3, 4, 6)
    assert torch.equal(made[:, 4:], wanted)
    assert made[:, :4, 0].eq(1).all()
    assert made[:, :4, 1:].eq(0).all()


@torch.no_grad()
def test_the_last_frame_is_known_too_where_it_is_given(
    bind_components: Callable[..., dict[str, Any]], image: Image.Image
) -> None:
    vae = bind_components("flf2v")["vae"]
    end = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    size = {"num_frames": 9, "height": 32, "width": 48}
    given = {"input_image": image, "end_image": end, **size}
    made = FIRST.run(given, {"vae": vae})["y"]
    prepare = VideoProcessor(vae_scale_factor=8).preprocess
    first, last = (
        prepare(one, height=32, width=48)[:, :, None] for one in (image, end)
    )
    grey = torch.zeros(1, 3, 7, 32, 48)
    assert torch.equal(
        made[:, 4:], normalized(vae, torch.cat([first, grey, last], dim=2))
    )
    known = torch.zeros(4, 3)
    known[:, 0] = 1
    known[3, 2] = 1
    assert torch.equal(made[0, :4], known[..., None, None].expand(-1, -1, 4, 6))
    with pytest.raises(InputError, match="num_frames"):
        FIRST.run({**given, "num_frames": 1}, {"vae": vae})


@torch.no_grad()
def test_the_features_of_both_ends_follow_each_other(
    bind_components: Callable[..., dict[str, Any]], image: Image.Image
) -> None:
    encoder = {"image_encoder": bind_components("flf2v")["image_encoder"]}
    end = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    made = ENDS.run({"input_image": image, "end_image": end}, encoder)["clip_feature"]
    alone = [
        CLIP.run({"input_image": one}, encoder)["clip_feature"] for one in (image, end)
    ]
    assert torch.equal(made, torch.cat(alone, dim=1))


@torch.no_grad()
def test_the_first_latents_are_those_of_a_video_that_begins_with_the_image(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    loaded, frames = bind_components("ti2v-5b"), video(5, 32, 64)
    given = {
        "input_image": Image.fromarray(frames.pixels[0].numpy()),
        "height": 32,
        "width": 64,
    }
    first = FIRST_FRAME.run(given, loaded)["first_latents"]
    assert first.shape == (1, 48, 1, 2, 4)
    assert (
        first - VIDEO.run({"input_video": frames}, loaded)["input_latents"][:, :, :1]
    ).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "shape"), [("t2v", (1, 16, 2, 4, 6)), ("ti2v-5b", (1, 48, 2, 2, 3))]
)
def test_decoding_makes_the_frames_that_diffusers_makes(
    variant: str, shape: tuple[int, ...], bind_components: Callable[..., dict[str, Any]]
) -> None:
    vae = bind_components(variant)["vae"]
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    pixels = vae.decode(latents / (1 / std) + mean, return_dict=False)[0]
    wanted = VideoProcessor(vae_scale_factor=8).postprocess_video(
        pixels, output_type="pil"
    )[0]
    made = units.decode(latents, 24.0, vae=vae)["video"]
    assert made.fps == 24.0
    assert made.pixels.dtype == torch.uint8
    assert np.array_equal(
        made.pixels.numpy(), np.stack([np.asarray(frame) for frame in wanted])
    )


@torch.no_grad()
def test_in_bf16_embeddings_are_bf16_and_latents_fp32(
    bind_components: Callable[..., dict[str, Any]], image: Image.Image
) -> None:
    loaded = bind_components("i2v", torch.bfloat16)
    size = {"num_frames": 5, "height": 32, "width": 32}
    assert PROMPT.run({"prompt": "x"}, loaded)["prompt_emb"].dtype == torch.bfloat16
    assert (
        CLIP.run({"input_image": image}, loaded)["clip_feature"].dtype == torch.bfloat16
    )
    assert FIRST.run({"input_image": image, **size}, loaded)["y"].dtype == torch.float32
    latents = VIDEO.run({"input_video": video(5, 32, 32)}, loaded)["input_latents"]
    assert latents.dtype == torch.float32
    assert units.decode(latents, 16.0, vae=loaded["vae"])["video"].pixels.shape == (
        5,
        32,
        32,
        3,
    )
