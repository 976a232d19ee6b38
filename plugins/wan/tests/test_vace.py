"""VACE gives what diffusers' one network of denoiser and VACE gives, and is read from its
files.
"""

import gc
import inspect
import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanVACEPipeline, WanVACETransformer3DModel
from dstrain import SFT, Frames, LoraConfig, ModelConfig, UsageError, save_lora
from dstrain.data import DataConfig, Resolution, open_dataset, write_video
from dstrain.graph import make_plan
from dstrain.lora import inject
from dstrain.models import assign, to_checkpoint
from dstrain.models.configs import ConfigQuery, find_config
from dstrain.models.execution import enable_checkpointing
from dstrain.plugin import InputError, Unit
from dstrain_wan import MODEL, vace
from dstrain_wan.components import COMPONENTS
from dstrain_wan.pipeline import PIPELINES
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

BY_NAME = {component.name: component for component in COMPONENTS}
CONDITIONS = Unit(vace.encode_conditions)
MASK = "vace_video_mask"
SIZE = {"num_frames": 9, "height": 32, "width": 48}


def video(frames: int = 9, height: int = 32, width: int = 48, seed: int = 0) -> Frames:
    noise = np.random.default_rng(seed)
    pixels = noise.integers(0, 256, (frames, height, width, 3), np.uint8)
    return Frames(torch.from_numpy(pixels), 16.0)


def as_images(frames: Frames | None) -> list[Image.Image] | None:
    if frames is None:
        return None
    return [Image.fromarray(one.numpy()) for one in frames.pixels]


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
def test_conditions_are_those_of_diffusers(
    shown: Frames | None,
    mask: Frames | None,
    size: tuple[int, int] | None,
    bind_components: Callable[..., dict[str, Any]],
    image: Image.Image,
) -> None:
    loaded = bind_components("vace")
    reference = None if size is None else image.resize(size)
    given = {
        "vace_video": shown,
        "vace_video_mask": mask,
        "vace_reference_image": reference,
    }
    made = CONDITIONS.run({**SIZE, **given}, loaded)["vace_context"]
    theirs = WanVACEPipeline(
        vae=loaded["vae"],
        transformer=loaded["dit"],
        **dict.fromkeys(("tokenizer", "text_encoder", "scheduler")),
    )
    prepared = theirs.preprocess_conditions(
        as_images(shown), as_images(mask), reference, **SIZE, dtype=torch.float32
    )
    wanted = torch.cat(
        [theirs.prepare_video_latents(*prepared), theirs.prepare_masks(*prepared[1:])],
        dim=1,
    )
    assert made.shape == wanted.shape == (1, 96, 3 + (size is not None), 4, 6)
    assert (made - wanted).abs().max() <= 1e-6


@torch.no_grad()
def test_a_conditioning_video_is_cut_and_resized_and_a_shorter_one_refused(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    loaded = bind_components("vace")
    longer = video(11, 64, 96)
    made = CONDITIONS.run({**SIZE, "vace_video": longer}, loaded)["vace_context"]
    assert made.shape == (1, 96, 3, 4, 6)
    with pytest.raises(InputError, match="vace_video") as raised:
        CONDITIONS.run({**SIZE, "vace_video": video(5)}, loaded)
    assert "frames: 5, but the video to generate has 9" in str(raised.value)


@torch.no_grad()
def test_the_frame_of_a_reference_is_learned_and_not_shown(
    bind_components: Callable[..., dict[str, Any]], image: Image.Image
) -> None:
    loaded = bind_components("vace")
    vae = loaded["vae"]
    latents = vace.encode_video_after_reference(video(), image, vae=vae)[
        "input_latents"
    ]
    alone = vace.encode_video_after_reference(video(), vae=vae)["input_latents"]
    assert torch.equal(latents[:, :, 1:], alone)
    shape = vace.latent_shape(32, 48, 9, image, vae_config=loaded["vae_config"])
    assert latents.shape == shape == (1, 16, 4, 4, 6)
    pixels = vace.decode(latents, 9, 16.0, vae=vae)["video"].pixels
    assert torch.equal(pixels, vace.decode(alone, 9, 16.0, vae=vae)["video"].pixels)


def gradients(loaded: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return those of both networks' weights for one batch of two."""
    noise = torch.Generator().manual_seed(0)
    shapes = ((2, 16, 3, 4, 6), (2, 7, 32), (2, 96, 3, 4, 6))
    latents, text, context = (
        torch.randn(shape, generator=noise).to(dtype) for shape in shapes
    )
    for name in ("dit", "vace"):
        loaded[name].requires_grad_(True).zero_grad()
    made = vace.predict(
        latents,
        torch.tensor([900.0, 100.0]),
        text,
        context,
        dit=loaded["dit"],
        vace=loaded["vace"],
    )
    made.square().mean().backward()
    return {
        f"{name}.{key}": weight.grad.clone()
        for name in ("dit", "vace")
        for key, weight in loaded[name].named_parameters()
    }


@pytest.mark.parametrize("offload", [False, True], ids=["recomputed", "in RAM"])
@pytest.mark.parametrize("checkpointed", [("dit",), ("vace",), ("dit", "vace")])
def test_checkpointing_either_or_both_changes_no_gradient(
    checkpointed: tuple[str, ...],
    offload: bool,
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    loaded = bind_components("vace")
    plain = gradients(loaded, torch.float32)
    for name in checkpointed:
        enable_checkpointing(name, loaded[name], offload)
    again = gradients(loaded, torch.float32)
    assert all(one.abs().max() > 0 for one in plain.values())
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_nothing_of_a_step_is_kept_after_it(
    bind_components: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = bind_components("vace")
    enable_checkpointing("dit", loaded["dit"], False)
    seen: list[weakref.ref[Any]] = []

    class Watched(vace._Added):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            seen.append(weakref.ref(self))

    monkeypatch.setattr(vace, "_Added", Watched)
    gc.disable()
    try:
        gradients(loaded, torch.float32)
    finally:
        gc.enable()
    assert [one() for one in seen] == [None]


def both_networks(loaded: Mapping[str, Any]) -> WanVACETransformer3DModel:
    known = inspect.signature(WanVACETransformer3DModel.__init__).parameters
    both = WanVACETransformer3DModel(
        **{name: one for name, one in loaded["dit"].config.items() if name in known},
        vace_layers=[0, 1],
    )
    both.load_state_dict({**loaded["dit"].state_dict(), **loaded["vace"].state_dict()})
    return both


@pytest.mark.parametrize("kind", ["original", "diffusers"])
def test_one_file_has_the_denoiser_and_vace(
    kind: str, bind_components: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    loaded = bind_components("vace")
    place = tmp_path / "model"
    if kind == "diffusers":
        both_networks(loaded).save_pretrained(place)
    else:
        place.mkdir()
        weights = {}
        for name in ("dit", "vace"):
            own = BY_NAME[name].formats[0]
            weights |= to_checkpoint(own, loaded[name].state_dict())
        save_file(weights, place / "diffusion_pytorch_model.safetensors")
        (place / "config.json").write_text(
            '{"_class_name": "VaceWanModel", "model_type": "vace", "dim": 24, "ffn_dim": 64,'
            '"freq_dim": 256, "in_dim": 16, "num_heads": 2, "num_layers": 2, "out_dim": 16,'
            '"vace_layers": [0, 1], "vace_in_dim": 96}'
        )
    paths = tuple(map(str, place.glob("*.safetensors")))
    found = assign([ModelConfig(path=paths)], COMPONENTS, ["dit", "vace"])
    for name in ("dit", "vace"):
        component = BY_NAME[name]
        config = dict(find_config(ConfigQuery(component, found[name])))
        if name == "dit":
            config["rope_max_seq_len"] = 1024
        again = component.network.load(
            found[name], component.configure(config), torch.float32
        ).state_dict()
        wanted = loaded[name].state_dict()
        assert again.keys() == wanted.keys()
        assert all(torch.equal(again[key], wanted[key]) for key in wanted)


# diffusers adds layers of zeros to the denoiser's blocks.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
@torch.no_grad()
def test_a_lora_of_vace_acts_in_diffusers_as_here(
    bind_components: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    trained, other = bind_components("vace"), bind_components("vace")
    config = LoraConfig("vace", MODEL.lora_targets["vace"], 4, 4.0)
    inject(trained["vace"], config, MODEL.lora_aliases)
    for name, weight in trained["vace"].named_parameters():
        if "lora_B" in name:
            weight.normal_()
    prefix = MODEL.lora_prefixes["vace"]
    save_lora(tmp_path / "lora.safetensors", trained["vace"], config, prefix, {})
    published = WanVACEPipeline(
        **{name: other[name] for name in ("tokenizer", "text_encoder", "vae")},
        transformer=both_networks(other),
        scheduler=None,
    )
    published.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    latents, text = torch.randn(1, 16, 3, 4, 6), torch.randn(1, 512, 32)
    context, timestep = torch.randn(1, 96, 3, 4, 6), torch.tensor([500.0])
    ours, plain = (
        vace.predict(latents, timestep, text, context, dit=one["dit"], vace=one["vace"])
        for one in (trained, other)
    )
    theirs = published.transformer(
        latents, timestep, text, control_hidden_states=context, return_dict=False
    )[0]
    assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()
    assert (ours - plain).abs().max() > 1e-2


def test_vace_of_one_expert_is_trained_beside_it_alone() -> None:
    spec = MODEL.spec("vace-a14b")
    given = frozenset(
        {"prompt", "input_video", "height", "width", "num_frames", "fps", "vace_video"}
    )
    for name, expert in (("vace", "dit"), ("vace2", "dit2")):
        plan = make_plan(spec, given, SFT, (name,))
        assert plan.components["train"] == (expert, name)
        assert plan.components["data_process"] == ("text_encoder", "vae", "tokenizer")


def test_a_mask_of_another_size_is_cropped_with_its_video(tmp_path: Path) -> None:
    for name, height, width in (("video", 100, 72), ("mask", 50, 36), ("wide", 36, 50)):
        pixels = torch.zeros(5, height, width, 3, dtype=torch.uint8)
        write_video(Frames(pixels, 16.0), tmp_path / f"{name}.mp4")
    inputs = {name: PIPELINES["vace"].inputs[name] for name in ("vace_video", MASK)}
    config = DataConfig(
        tmp_path, None, None, Resolution(None, None, 2**20), ("vace_video", MASK)
    )

    def cells(mask: str) -> dict[str, Any]:
        rows = [{"vace_video": "video.mp4", MASK: f"{mask}.mp4"}]
        (tmp_path / "metadata.json").write_text(json.dumps(rows))
        return dict(open_dataset(config, inputs).rows[0])

    # By itself, the mask would be 48 x 32, of which 50 x 36 is cropped otherwise.
    assert cells("mask")[MASK].shapes == ((5, 96, 64),)
    with pytest.raises(UsageError, match="expected that size or its aspect ratio"):
        cells("wide")
