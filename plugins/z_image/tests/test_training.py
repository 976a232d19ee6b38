"""The loss of training, and its gradient, are those of DiffSynth-Studio: computed here by its
equations and diffusers' transformer, from the image and the prompt on.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from dstrain import TrainConfig, run
from safetensors.torch import load_file
from torch import Tensor

from tests.support.noise_images import noise_image
from tests.support.runs import training_run
from tests.support.toys import opened, toy
from tests.support.training_batches import assert_same_gradients, batch

PROMPTS = ("a dog", "two dogs that run over a long bridge in the rain")


def write_data(folder: Path) -> None:
    folder.mkdir()
    lines = ["image,prompt"]
    for number, prompt in enumerate(PROMPTS):
        noise_image(48, 32, number).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{prompt}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


class Reference:
    """DiffSynth-Studio's flow matching for Z-Image (set_timesteps_z_image, add_noise,
    training_target and training_weight of diffsynth/diffusion/flow_match.py).
    """

    def __init__(self) -> None:
        plain = torch.linspace(1.0, 0.0, 1001)[:-1]
        self.sigmas = 3 * plain / (1 + 2 * plain)
        bell = torch.exp(-2 * (self.sigmas - 0.5) ** 2)
        lifted = bell - bell.min()
        self.weights = lifted * (1000 / lifted.sum())

    def loss(self, pipeline: Any, image: Any, prompt: str, seen: Any) -> Tensor:
        """Return the loss of FlowMatchSFTLoss where the denoiser sees these latents, (16, 1,
        h, w), at this time, which has to be one of the table.
        """
        noisy, time = seen
        with torch.no_grad():
            pixels = pipeline.image_processor.preprocess(image)
            mode = pipeline.vae.encode(pixels).latent_dist.mode()
            settings = pipeline.vae.config
            latents = (mode - settings.shift_factor) * settings.scaling_factor
            texts, _ = pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)
        index = int((self.sigmas - (1 - time)).abs().argmin())
        sigma = self.sigmas[index]
        assert abs(float(sigma - (1 - time))) < 1e-6
        noise = (noisy[None, :, 0] - (1 - sigma) * latents) / sigma
        noisy = (1 - sigma) * latents + sigma * noise
        time = (1000 - 1000 * sigma[None]) / 1000
        images = list(noisy[:, :, None])
        (made,) = pipeline.transformer(images, time, texts, return_dict=False)[0]
        error = -made[None, :, 0] - (noise - latents)
        return error.square().mean() * self.weights[index]


@pytest.mark.parametrize("variant", ["base", "turbo"])
def test_loss_and_gradient_are_those_of_diffsynth_studio(
    variant: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    write_data(data)
    config = TrainConfig(
        model="z_image",
        variant=variant,
        toy=True,
        dataset_base_path=data,
        output_path=tmp_path / "out",
        trainable_models="dit",
        mixed_precision="no",
        seed=3,
    )
    ready = training_run(config)
    dit = ready.module.pipeline.components["dit"]
    seen: list[tuple[Tensor, Tensor]] = []
    hook = dit.register_forward_pre_hook(
        lambda _, given: seen.append((torch.stack(given[0]), given[1]))
    )
    ours = ready.module(batch(ready, (0, 1)))
    hook.remove()
    ((noisy, time),) = seen
    published = ZImagePipeline.from_pretrained(toy("z_image", variant))
    losses = [
        Reference().loss(
            published, noise_image(48, 32, row), prompt, (noisy[row], time[row])
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    theirs = torch.stack(losses).mean()
    assert_same_gradients((dit, ours), (published.transformer, theirs))


def test_a_controlnet_trains_alike_where_blocks_are_recomputed(tmp_path: Path) -> None:
    """Each layer of it is computed within the call of a block, and uses what the one before
    made.
    """
    data = tmp_path / "data"
    write_data(data)
    table = data / "metadata.csv"
    header, *rows = table.read_text().splitlines()
    lines = [
        f"{header},controlnet_image",
        *(f"{row},{1 - i}.png" for i, row in enumerate(rows)),
    ]
    table.write_text("\n".join(lines) + "\n")
    saved = []
    for recomputed in (False, True):
        out = tmp_path / f"out-{recomputed}"
        config = TrainConfig(
            model="z_image",
            variant="controlnet-union",
            toy=True,
            dataset_base_path=data,
            output_path=out,
            trainable_models="controlnet",
            learning_rate=1e-2,
            dataset_repeat=2,
            batch_size=2,
            use_gradient_checkpointing=recomputed,
        )
        run(config)
        (file,) = out.glob("*.safetensors")
        saved.append(load_file(file))
    plain, again = saved
    assert plain.keys() == again.keys()
    assert all(torch.equal(one, again[name]) for name, one in plain.items())
    before = opened("z_image", "controlnet-union").components["controlnet"].state_dict()
    assert all(not torch.equal(one, plain[name]) for name, one in before.items())
