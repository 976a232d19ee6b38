"""What the Fun models and speed control add to the denoiser, computed here otherwise."""

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from dstrain import Frames
from dstrain.plugin import InputError, Unit
from dstrain_wan import camera, control, motion, units
from dstrain_wan.networks import WanTransformer3DModel
from PIL import Image
from torch.nn.functional import conv2d, interpolate, pixel_unshuffle, relu

CAMERA = Unit(camera.encode_camera)
NOISE = torch.Generator().manual_seed(0)
LATENTS, TEXT = (
    torch.randn(shape, generator=NOISE) for shape in ((2, 16, 3, 4, 6), (2, 7, 32))
)
TIMESTEP = torch.tensor([900.0, 100.0])


def transformer(**sizes: Any) -> WanTransformer3DModel:
    torch.manual_seed(1)
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        ffn_dim=64,
        num_layers=1,
        **sizes,
    ).eval()


@torch.no_grad()
def test_without_conditions_it_is_the_network_of_diffusers() -> None:
    ours = transformer(ref_channels=16, camera_channels=24)
    published = {
        name: value
        for name, value in ours.config.items()
        if not name.startswith("_") and not name.endswith("ref_channels")
    }
    published.pop("camera_channels")
    theirs = diffusers.WanTransformer3DModel(**published).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    given = (LATENTS, TIMESTEP, TEXT)
    assert torch.equal(
        ours(*given, return_dict=False)[0], theirs(*given, return_dict=False)[0]
    )


@torch.no_grad()
def test_a_reference_is_a_frame_before_the_others_with_patches_of_its_own() -> None:
    network = transformer(ref_channels=3)
    reference = torch.randn(2, 3, 1, 4, 6, generator=NOISE)
    made = network(
        LATENTS, TIMESTEP, TEXT, reference_latents=reference, return_dict=False
    )[0]
    assert made.shape == LATENTS.shape
    # Written out: blocks over the tokens of four frames.
    rotary = network.rope(torch.zeros(2, 16, 4, 4, 6))
    patches = network.patch_embedding(LATENTS).flatten(2).transpose(1, 2)
    first = conv2d(
        reference[:, :, 0], network.ref_conv.weight, network.ref_conv.bias, stride=2
    )
    joined = torch.cat([first.flatten(2).transpose(1, 2), patches], dim=1)
    temb, modulation, text, _ = network.condition_embedder(TIMESTEP, TEXT, None)
    (block,) = network.blocks
    states = block(joined, text, modulation.unflatten(1, (6, -1)), rotary)[:, 6:]
    shift, scale = (network.scale_shift_table + temb[:, None]).chunk(2, dim=1)
    states = network.proj_out(network.norm_out(states) * (1 + scale) + shift)
    wanted = states.view(2, 3, 2, 3, 2, 2, 16).permute(0, 6, 1, 2, 4, 3, 5)
    assert (made - wanted.reshape(made.shape)).abs().max() <= 1e-5


@torch.no_grad()
def test_rays_are_added_to_the_patches() -> None:
    network = transformer(camera_channels=24)
    rays = torch.randn(2, 24, 3, 32, 48, generator=NOISE)
    adapter = network.control_adapter
    (block,) = adapter.residual_blocks
    frames = []
    for one in rays.transpose(1, 2):
        embedded = adapter.conv(pixel_unshuffle(one, 8))
        frames.append(embedded + block.conv2(relu(block.conv1(embedded))))
    wanted = torch.stack(frames).transpose(1, 2)
    assert wanted.shape == (2, 24, 3, 2, 3)
    assert (adapter(rays) - wanted).abs().max() <= 1e-5
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda block, given: seen.append(given))
    for more in ({}, {"rays": rays}):
        network(LATENTS, TIMESTEP, TEXT, return_dict=False, **more)
    added = seen[1][0] - seen[0][0]
    assert (added - wanted.flatten(2).transpose(1, 2)).abs().max() <= 1e-5


def test_a_hook_of_one_call_does_not_act_in_the_next() -> None:
    network = transformer(camera_channels=24)
    with pytest.raises(RuntimeError):
        network(LATENTS, TIMESTEP, TEXT, rays=torch.zeros(2, 23, 3, 32, 48))
    assert not network.patch_embedding._forward_hooks


@pytest.mark.parametrize(
    ("direction", "row", "sign"),
    [("Left", 0, -1), ("Right", 0, 1), ("Up", 1, -1), ("Down", 1, 1)],
)
def test_the_camera_moves_on_at_one_speed(direction: str, row: int, sign: int) -> None:
    size = {"num_frames": 5, "height": 720, "width": 1280}
    given = {"camera_control_direction": direction, **size}
    made = CAMERA.run({**given, "camera_control_speed": 0.5}, {})["camera"]
    assert made.shape == (1, 5, 16)
    # At the aspect ratio of the published camera its focal lengths are as they were.
    focal = torch.tensor([0.532139961 * 1280, 0.946026558 * 720, 640.0, 360.0])
    assert torch.allclose(made[0, :, :4], focal.expand(5, 4))
    matrices = made[0, :, 4:].view(5, 3, 4)
    assert torch.allclose(matrices[:, row, 2], sign * 0.5 * torch.arange(5.0))
    matrices[:, row, 2] = 0
    assert torch.equal(matrices, torch.eye(4)[:3].expand(5, 3, 4))
    slow = CAMERA.run(given, {})["camera"]
    assert torch.allclose(
        slow[0, 4, 4:].view(3, 4)[row, 2], torch.tensor(sign * 4 / 54)
    )


@pytest.mark.parametrize("size", [(32, 48), (64, 48)], ids=["wide", "high"])
def test_rays_are_where_a_pixel_looks(size: tuple[int, int]) -> None:
    height, width = size
    given = {"num_frames": 5, "height": height, "width": width}
    made = camera.encode_camera("LeftUp", **given, camera_control_speed=0.1)["camera"]
    rays = camera.rays(made, height, width)
    assert rays.shape == (1, 24, 2, height, width)
    # channel = 4 * coordinate + frame of the latent frame.
    coordinates = rays[0].unflatten(0, (6, 4)).flatten(1, 2)
    assert torch.equal(coordinates[:, 0], coordinates[:, 2])  # frame 0, latent 0
    x, y = 5, 17
    focal_x, focal_y, centre_x, centre_y = made[0, 3, :4].tolist()
    assert (centre_x, centre_y) == (width / 2, height / 2)
    seen = np.array(
        [(x + 0.5 - centre_x) / focal_x, (y + 0.5 - centre_y) / focal_y, 1.0]
    )
    wanted = made[0, 3, 4:].view(3, 4)[:, :3].numpy() @ (seen / np.linalg.norm(seen))
    # Frame 3 is the third of the second latent frame.
    found = rays[0].unflatten(0, (6, 4))[:, 2, 1, y, x].numpy()
    assert np.abs(found[3:] - wanted).max() <= 1e-6
    assert not found[:3].any()  # it stays where it is, and only turns
    sides = {"wide": focal_x / height, "high": focal_y / width}
    cut = "wide" if width / height < camera.ASPECT else "high"
    wanted_side = {"wide": 0.532139961 * 1280 / 720, "high": 0.946026558 * 720 / 1280}
    assert sides[cut] == pytest.approx(wanted_side[cut])


@torch.no_grad()
def test_what_is_not_given_to_fun_control_is_zeros(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    dit = bind_components("fun-control")["dit"]
    shown = torch.randn(2, 16, 3, 4, 6, generator=NOISE)
    made = control.predict(LATENTS, TIMESTEP, TEXT, shown, dit=dit)
    nothing = control.predict(
        LATENTS,
        TIMESTEP,
        TEXT,
        shown,
        torch.zeros(2, 20, 3, 4, 6),
        torch.zeros(2, 257, 16),
        dit=dit,
    )
    assert torch.equal(made, nothing)
    other = control.predict(LATENTS, TIMESTEP, TEXT, -shown, dit=dit)
    assert not torch.allclose(made, other)


@torch.no_grad()
def test_a_control_is_encoded_in_the_size_of_the_video(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    vae = bind_components("fun-control")["vae"]
    pixels = torch.randint(0, 256, (9, 32, 48, 3), generator=NOISE).to(torch.uint8)
    size = {"num_frames": 9, "height": 32, "width": 48}
    made = control.encode_control(Frames(pixels, 16.0), **size, vae=vae)
    wanted = units.encode_video(Frames(pixels, 16.0), vae=vae)["input_latents"]
    assert torch.equal(made["control_latents"], wanted)
    with pytest.raises(InputError, match="control_video"):
        control.encode_control(Frames(pixels[:5], 16.0), **size, vae=vae)
    image = Image.fromarray(pixels[0].numpy())
    reference = control.encode_reference(image, 32, 48, vae=vae)["reference_latents"]
    assert (reference - wanted[:, :, :1]).abs().max() <= 1e-5


@torch.no_grad()
def test_the_speed_is_in_the_modulation_of_blocks_and_not_of_the_end(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    loaded = bind_components("speedcontrol")
    dit, controller = loaded["dit"], loaded["motion_controller"]
    speed = torch.cat([motion.encode_speed(one)["speed"] for one in (3.0, 80.0)])
    made = motion.predict(
        LATENTS, TIMESTEP, TEXT, speed, dit=dit, motion_controller=controller
    )
    angles = speed[:, None] * 10 / 10000 ** (torch.arange(16) / 16)
    waves = torch.cat([angles.cos(), angles.sin()], dim=1)
    added = controller.linear(waves)
    hook = dit.condition_embedder.register_forward_hook(
        lambda module, given, found: (found[0], found[1] + added, *found[2:])
    )
    padded = torch.nn.functional.pad(TEXT, (0, 0, 0, 505))
    wanted = dit(LATENTS, TIMESTEP, padded, return_dict=False)[0]
    hook.remove()
    plain = dit(LATENTS, TIMESTEP, padded, return_dict=False)[0]
    assert (made - wanted).abs().max() <= 1e-5
    assert (made - plain).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("size", [(48, 32), (72, 56), (28, 28), (16, 160)])
def test_the_image_encoder_of_fun_models_sees_the_whole_image_squeezed(
    size: tuple[int, int],
    bind_components: Callable[..., dict[str, Any]],
    image: Image.Image,
) -> None:
    encoder = bind_components("fun-control")["image_encoder"]
    shown = image.resize(size)
    width, height = size
    given = {"height": height, "width": width}
    made = Unit(control.encode_squeezed_clip).run(
        {"input_image": shown, **given}, {"image_encoder": encoder}
    )["clip_feature"]
    # Written out: from -1..1 as the VAE gets it, colour by colour.
    pixels = torch.tensor(np.array(shown)) / 127.5 - 1
    colours = [
        (interpolate(one[None, None], (28, 28), mode="bicubic") / 2 + 0.5 - mean) / std
        for one, mean, std in zip(
            pixels.unbind(-1), units.CLIP_MEAN, units.CLIP_STD, strict=True
        )
    ]
    wanted = encoder(
        torch.cat(colours, dim=1), output_hidden_states=True
    ).hidden_states[-2]
    assert (made - wanted).abs().max() <= 1e-5
    of_reference = Unit(control.encode_clip_of_reference).run(
        {"reference_image": shown, **given}, {"image_encoder": encoder}
    )["clip_feature"]
    assert torch.equal(of_reference, made)


@torch.no_grad()
def test_an_image_of_another_size_is_seen_at_the_size_of_the_video(
    bind_components: Callable[..., dict[str, Any]], image: Image.Image
) -> None:
    encoder = {"image_encoder": bind_components("fun-camera")["image_encoder"]}
    unit, size = Unit(control.encode_squeezed_clip), {"height": 32, "width": 48}
    scaled = image.resize((48, 32), Image.Resampling.LANCZOS)
    made, wanted = (
        unit.run({"input_image": one, **size}, encoder)["clip_feature"]
        for one in (image, scaled)
    )
    assert torch.equal(made, wanted)
