"""The loss of training, and its gradient, are those of DiffSynth-Studio: computed here by its
equations and diffusers' transformer, from the images and the prompt on.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from dstrain import TrainConfig
from torch import Tensor

from tests.support.noise_images import noise_image
from tests.support.runs import training_run
from tests.support.toys import opened, toy
from tests.support.training_batches import assert_same_gradients, batch

from .test_conformance import LAYERS, build

PROMPTS = ("a dog", "two dogs that run over a long bridge in the rain")
SIGMAS = torch.linspace(1.0, 1 / 1000, 1000)
SIGMAS = math.exp(0.8) / (math.exp(0.8) + (1 / SIGMAS - 1))
"""set_timesteps_flux2 of diffsynth/diffusion/flow_match.py, in training."""


def write_data(folder: Path) -> None:
    """Write images, each with two reference images that are not resized."""
    folder.mkdir()
    lines = ["image,prompt,edit_image"]
    for row, prompt in enumerate(PROMPTS):
        noise_image(48, 32, row).save(folder / f"{row}.png")
        for number, image in enumerate(references(row)):
            image.save(folder / f"{row}-{number}.png")
        cells = [f"{row}.png", prompt, f'"[""{row}-0.png"", ""{row}-1.png""]"']
        lines.append(",".join(cells))
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


def references(row: int) -> list[Any]:
    return [noise_image(32, 16, 5 + row), noise_image(16, 32, 7 + row)]


def published_loss(
    pipeline: Any, row: int, edits: bool, seen: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the loss of FlowMatchSFTLoss where the denoiser sees these tokens at this time,
    which has to be one of the table (diffsynth/pipelines/flux2_image.py).
    """
    tokens, time = seen
    with torch.no_grad():
        images = [noise_image(48, 32, row), *(references(row) if edits else [])]
        latents = []
        for image in images:
            pixels = pipeline.image_processor.preprocess(image)
            latents.append(pipeline._encode_vae_image(pixels, torch.Generator()))
        packed = [pipeline._pack_latents(one) for one in latents]
        ids = pipeline._prepare_latent_ids(latents[0])
        if edits:
            others = pipeline._prepare_image_ids(latents[1:])
            ids = torch.cat([ids, others], dim=1)
        text, text_ids = pipeline.encode_prompt(
            PROMPTS[row], text_encoder_out_layers=LAYERS
        )
    index = int((SIGMAS - time).abs().argmin())
    sigma, count = SIGMAS[index], packed[0].shape[1]
    assert abs(float(sigma - time)) < 1e-6
    noise = (tokens[None, :count] - (1 - sigma) * packed[0]) / sigma
    noisy = (1 - sigma) * packed[0] + sigma * noise
    made = pipeline.transformer(
        hidden_states=torch.cat([noisy, *packed[1:]], dim=1),
        timestep=sigma[None],
        guidance=torch.tensor([1.0]),
        encoder_hidden_states=text,
        txt_ids=text_ids,
        img_ids=ids,
        return_dict=False,
    )[0]
    bell = torch.exp(-2 * (SIGMAS - 0.5) ** 2)
    lifted = bell - bell.min()
    error = made[:, :count] - (noise - packed[0])
    return error.square().mean() * (lifted * 1000 / lifted.sum())[index]


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("variant", ["dev", "klein-base"])
def test_loss_and_gradient_are_those_of_diffsynth_studio(
    variant: str, edits: bool, tmp_path: Path
) -> None:
    write_data(tmp_path / "data")
    config = TrainConfig(
        model="flux2",
        variant=variant,
        toy=True,
        dataset_base_path=tmp_path / "data",
        extra_inputs="edit_image" if edits else None,
        output_path=tmp_path / "out",
        trainable_models="dit",
        mixed_precision="no",
        seed=3,
    )
    ready = training_run(config)
    dit = ready.module.pipeline.components["dit"]
    seen: list[tuple[Tensor, Tensor]] = []
    hook = dit.register_forward_pre_hook(
        lambda _, __, named: seen.append((named["hidden_states"], named["timestep"])),
        with_kwargs=True,
    )
    ours = ready.module(batch(ready, (0, 1)))
    hook.remove()
    ((tokens, time),) = seen
    folder = toy("flux2", variant)
    published = build(opened("flux2", variant), folder)
    published.transformer = Flux2Transformer2DModel.from_pretrained(
        folder / "transformer"
    )
    losses = [
        published_loss(published, row, edits, (tokens[row], time[row]))
        for row in range(len(PROMPTS))
    ]
    theirs = torch.stack(losses).mean()
    assert_same_gradients((dit, ours), (published.transformer, theirs))
