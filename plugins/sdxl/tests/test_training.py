"""The loss of training, and its gradient, are those of diffusers' script
(examples/text_to_image/train_text_to_image_lora_sdxl.py): computed here by its formulas and
diffusers' scheduler and U-Net, from the image and the prompt on.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionXLPipeline
from diffusers.training_utils import compute_snr
from dstrain import TrainConfig
from PIL import Image
from torch import Tensor

from tests.support.noise_images import noise_image
from tests.support.runs import training_run
from tests.support.toys import toy
from tests.support.training_batches import assert_same_gradients, batch

PROMPTS = ("a dog", "two dogs that run over a long bridge in the rain")
ORIGINALS = ((96, 144), (96, 40))
"""(height, width) of the images, which are loaded at 32 x 40."""
CROPS = ((0, 4), (32, 0))
"""Top and left of what is kept of them, scaled to 32 x 48 and left at 96 x 40."""


def write_data(folder: Path) -> None:
    folder.mkdir()
    lines = ["image,prompt"]
    for number, prompt in enumerate(PROMPTS):
        height, width = ORIGINALS[number]
        noise_image(width, height, number).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{prompt}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


def loss_of_the_script(
    pipeline: Any, image: Image.Image, row: int, seen: Any, gamma: float | None
) -> Tensor:
    """Return the script's loss where the denoiser sees these latents, (1, 4, h, w), at this
    time.
    """
    is_v = pipeline.scheduler.config.prediction_type == "v_prediction"
    scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    noisy, time = seen[0], seen[1].long()
    with torch.no_grad():
        pixels = pipeline.image_processor.preprocess(image)
        latents = pipeline.vae.encode(pixels).latent_dist.mode()
        latents = latents * pipeline.vae.config.scaling_factor
        prompt, _, pooled, _ = pipeline.encode_prompt(
            PROMPTS[row], do_classifier_free_guidance=False
        )
    square = scheduler.alphas_cumprod[time]
    noise = (noisy - square.sqrt() * latents) / (1 - square).sqrt()
    noisy = scheduler.add_noise(latents, noise, time)
    target = scheduler.get_velocity(latents, noise, time) if is_v else noise
    sizes = torch.tensor([[*ORIGINALS[row], *CROPS[row], 32, 40]])
    conditions = {"text_embeds": pooled, "time_ids": sizes}
    made = pipeline.unet(
        noisy, time, prompt, added_cond_kwargs=conditions, return_dict=False
    )[0]
    error = (made - target).square().mean()
    if gamma is None:
        return error
    snr = compute_snr(scheduler, time)
    weight = snr.clamp(max=gamma) / (snr + 1 if is_v else snr)
    return error * weight[0]


@pytest.mark.parametrize(
    ("variant", "gamma"), [("base", None), ("base", 5.0), ("v", None), ("v", 2.0)]
)
def test_loss_and_gradient_are_those_of_diffusers_script(
    variant: str, gamma: float | None, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    write_data(data)
    options: dict[str, Any] = {}
    if gamma is not None:
        options = {"loss_weighting": "min_snr", "min_snr_gamma": gamma}
    config = TrainConfig(
        model="sdxl",
        variant=variant,
        toy=True,
        dataset_base_path=data,
        output_path=tmp_path / "out",
        trainable_models="unet",
        height=32,
        width=40,
        mixed_precision="no",
        seed=3,
        **options,
    )
    ready = training_run(config)
    unet = ready.module.pipeline.components["unet"]
    seen: list[tuple[Tensor, Tensor]] = []
    hook = unet.register_forward_pre_hook(lambda _, given: seen.append(given[:2]))
    samples = batch(ready, (0, 1))
    ours = ready.module(samples)
    hook.remove()
    ((noisy, time),) = seen
    published = StableDiffusionXLPipeline.from_pretrained(toy("sdxl", variant))
    losses = []
    for row in range(len(PROMPTS)):
        one = slice(row, row + 1)
        image = samples.samples[row].values["input_image"]
        losses.append(
            loss_of_the_script(published, image, row, (noisy[one], time[one]), gamma)
        )
    theirs = torch.stack(losses).mean()
    assert_same_gradients((unet, ours), (published.unet, theirs))
