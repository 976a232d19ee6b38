"""Train the small image VAE that the demo uses: `python demo/train_vae.py [FOLDER]`,
about 4 minutes on one core.

It has the architecture of Qwen-Image's VAE at base_dim 8 (668 thousand parameters, 1.35
MB in fp16). It sees digits in ink and paper of any colours, so that it serves looks
which the demo's base model has never seen.
"""

from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from digits import LOOK, PLAIN, SIZE, TRAIN, Judge, Style, paint, strokes
from PIL import Image
from torch import nn
from torch.nn import functional

BATCH = 8
LEARNING_RATE = 2e-3
KL_WEIGHT = 1e-5
"""Weight of the divergence, per latent value, beside the absolute error of a pixel in
-1..1.
"""


def convolve_frame(
    layer: QwenImageCausalConv3d, frame: torch.Tensor, cache_x: None = None
) -> torch.Tensor:
    """Do what `layer` does to a video of one frame, (batch, channels, 1, height,
    width), in half the time.

    The convolution is causal: of its kernel, a first frame meets the last time slice
    only.
    """
    padding = (layer._padding[2], layer._padding[0])
    flat = functional.conv2d(
        frame[:, :, 0], layer.weight[:, :, -1], layer.bias, layer.stride[1:], padding
    )
    return flat[:, :, None]


def initialize(vae: AutoencoderKLQwenImage) -> None:
    """Draw weights for images: in the usual ones, drawn for videos, the biases drown
    the colours of an image.
    """
    for layer in vae.modules():
        if isinstance(layer, QwenImageCausalConv3d):
            nn.init.kaiming_normal_(layer.weight[:, :, -1], nonlinearity="linear")
            layer.forward = partial(convolve_frame, layer)
        elif isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            nn.init.zeros_(layer.bias)
    # The half that is the log-variance: latents with a noise of 1 would first have to
    # unlearn it.
    nn.init.constant_(vae.quant_conv.bias[16:], -4.0)


def colour(stroke: torch.Tensor) -> torch.Tensor:
    """Paint digits, (batch, height, width) in 0..1: one in three black on white, the
    others in random colours.

    Gives (batch, 3, 1, height, width) in -1..1.
    """
    batch = len(stroke)
    ink, paper = torch.rand(batch, 3) * 2 - 1, torch.rand(batch, 3) * 2 - 1
    plain = torch.rand(batch, 1) < 1 / 3
    ink, paper = torch.where(plain, -1.0, ink), torch.where(plain, 1.0, paper)
    return torch.lerp(paper[:, :, None, None], ink[:, :, None, None], stroke[:, None])[
        :, :, None
    ]


def loss(vae: AutoencoderKLQwenImage, image: torch.Tensor) -> torch.Tensor:
    """Give the error of images, (batch, 3, 1, height, width), after encoding and
    decoding.
    """
    latents = vae.encode(image).latent_dist
    # Not vae.decode, which clamps: a value beyond -1..1 would have no gradient to come
    # back.
    error = vae.decoder(vae.post_quant_conv(latents.sample())) - image
    divergence = 0.5 * (latents.mean**2 + latents.var - 1 - latents.logvar)
    return error.abs().mean() + KL_WEIGHT * divergence.mean()


def train(vae: AutoencoderKLQwenImage, stroke: torch.Tensor, steps: int) -> None:
    """Train `vae` on digits in colour: on parts of images, and for the last quarter
    of `steps` on whole ones.
    """
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.03
    )
    for step in range(1, steps + 1):
        side = SIZE // 2 if step <= 0.75 * steps else SIZE
        top, left = torch.randint(SIZE - side + 1, (2,)).tolist()
        part = stroke[
            torch.randint(len(stroke), (BATCH,)), top : top + side, left : left + side
        ]
        value = loss(vae, colour(part))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            click.echo(f"step {step} of {steps}: loss {value.item():.4f}")


@torch.no_grad()
def measure_latents(vae: AutoencoderKLQwenImage, stroke: torch.Tensor) -> None:
    """Set `latents_mean` and `latents_std`, one number a channel, to those of digits in
    colour.
    """
    latents = torch.cat(
        [vae.encode(colour(part)).latent_dist.mode() for part in stroke.split(64)]
    )
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def report(folder: Path, stroke: torch.Tensor, style: Style) -> None:
    """Print how well the saved VAE keeps the held-out digits in `style`, to the eye and
    to the judge.
    """
    vae, judge = (
        AutoencoderKLQwenImage.from_pretrained(
            folder, torch_dtype=torch.float32
        ).eval(),
        Judge(),
    )
    images = [paint(part, style) for part in stroke[TRAIN:].numpy()]
    real = (
        torch.from_numpy(np.stack(images) / 127.5 - 1)
        .float()
        .permute(0, 3, 1, 2)[:, :, None]
    )
    kept = torch.cat(
        [
            vae.decode(vae.encode(part).latent_dist.mode()).sample
            for part in real.split(64)
        ]
    )
    values = ((kept[:, :, 0] + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    digits = judge.digits[TRAIN:]
    click.echo(
        f"ink {style.ink}, paper {style.paper}: "
        f"mean absolute error {functional.l1_loss(kept, real).item() * 127.5:.2f} of 255, "
        f"judge {judge.accuracy([Image.fromarray(value) for value in values], digits):.3f} "
        f"(on the originals {judge.accuracy(images, digits):.3f})"
    )


@click.command()
@click.argument(
    "folder", type=click.Path(path_type=Path), default=Path(__file__).parent / "vae"
)
@click.option("--steps", default=3200, show_default=True, help="Batches to train on.")
def main(folder: Path, steps: int) -> None:
    """Train the VAE, save it to FOLDER in fp16, and print how well it keeps held-out
    digits.
    """
    torch.manual_seed(0)
    stroke = torch.from_numpy(strokes()[0])
    architecture = {
        "base_dim": 8,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 1,
        "attn_scales": [],
    }
    vae = AutoencoderKLQwenImage(
        **architecture, temperal_downsample=[False, True, True]
    )
    initialize(vae)
    train(vae, stroke[:TRAIN], steps)
    measure_latents(vae.eval(), stroke[:TRAIN])
    vae.half().save_pretrained(folder)
    for style in (PLAIN, LOOK):
        report(folder, stroke, style)


if __name__ == "__main__":
    main()
