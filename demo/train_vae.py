"""Train the small picture VAE that the demo uses: `python demo/train_vae.py [FOLDER]`, about 4 minutes on two cores.

It has the architecture of Qwen-Image's VAE at base_dim 8 (668 thousand parameters, 1.35 MB in fp16). It sees digits in ink and paper of
any colours, so that it serves looks which the demo's base model has never seen.
"""

from pathlib import Path

import click
import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from digits import LOOK, PLAIN, TRAIN, Judge, Style, paint, strokes
from PIL import Image
from torch.nn import functional

BATCH = 4
KL_WEIGHT = 1e-3
"""Weight of the divergence, per latent value, beside the absolute error of a pixel in -1..1."""


def colour(stroke: torch.Tensor) -> torch.Tensor:
    """Paint digits, (batch, 64, 64) in 0..1: half in random colours, half black on white; (batch, 3, 1, 64, 64) in -1..1."""
    batch = len(stroke)
    ink, paper = torch.rand(batch, 3) * 2 - 1, torch.rand(batch, 3) * 2 - 1
    plain = torch.rand(batch, 1) < 0.5
    ink, paper = torch.where(plain, -1.0, ink), torch.where(plain, 1.0, paper)
    return torch.lerp(paper[:, :, None, None], ink[:, :, None, None], stroke[:, None])[:, :, None]


def train(vae: AutoencoderKLQwenImage, stroke: torch.Tensor, steps: int) -> None:
    """Train `vae` on digits in colour for `steps` batches, with a learning rate that falls linearly from 2e-3."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    for step in range(1, steps + 1):
        picture = colour(stroke[torch.randint(len(stroke), (BATCH,))])
        latents = vae.encode(picture).latent_dist
        # Not vae.decode, which clamps: a value beyond -1..1 would have no gradient to come back.
        decoded = vae.decoder(vae.post_quant_conv(latents.sample()))
        error = functional.l1_loss(decoded, picture)
        divergence = 0.5 * (latents.mean**2 + latents.var - 1 - latents.logvar).mean()
        optimizer.zero_grad()
        (error + KL_WEIGHT * divergence).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            click.echo(f"step {step} of {steps}: error {error.item():.4f}, divergence {divergence.item():.2f}")


@torch.no_grad()
def measure_latents(vae: AutoencoderKLQwenImage, stroke: torch.Tensor) -> None:
    """Set `latents_mean` and `latents_std`, one number a channel, to those of digits in colour."""
    latents = torch.cat([vae.encode(colour(part)).latent_dist.mode() for part in stroke.split(64)])
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def report(folder: Path, stroke: torch.Tensor, style: Style) -> None:
    """Print how well the saved VAE keeps the held-out digits in `style`, to the eye and to the judge."""
    vae, judge = AutoencoderKLQwenImage.from_pretrained(folder, torch_dtype=torch.float32).eval(), Judge()
    pictures = [paint(part, style) for part in stroke[TRAIN:].numpy()]
    real = torch.stack([as_tensor(picture) for picture in pictures])
    kept = torch.cat([vae.decode(vae.encode(part).latent_dist.mode()).sample for part in real.split(64)])
    values = ((kept[:, :, 0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    digits = judge.digits[TRAIN:]
    click.echo(
        f"{style}: mean absolute error {functional.l1_loss(kept, real).item() * 127.5:.2f} of 255, "
        f"judge {judge.accuracy([Image.fromarray(value) for value in values], digits):.3f} "
        f"(on the originals {judge.accuracy(pictures, digits):.3f})"
    )


def as_tensor(picture: Image.Image) -> torch.Tensor:
    """Give a picture as (3, 1, height, width) in -1..1."""
    return torch.from_numpy(np.asarray(picture) / 127.5 - 1).float().permute(2, 0, 1)[:, None]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path(__file__).parent / "vae")
@click.option("--steps", default=3000, show_default=True, help="Batches to train on.")
def main(folder: Path, steps: int) -> None:
    """Train the VAE, save it to FOLDER in fp16, and print how well it keeps held-out digits."""
    torch.manual_seed(0)
    stroke = torch.from_numpy(strokes()[0])
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, attn_scales=[], temperal_downsample=[False, True, True]
    )
    with torch.no_grad():
        vae.quant_conv.bias[16:] = -4.0  # log-variance: latents with a noise of 1 would first have to unlearn it
    train(vae, stroke[:TRAIN], steps)
    measure_latents(vae.eval(), stroke[:TRAIN])
    vae.half().save_pretrained(folder)
    for style in (PLAIN, LOOK):
        report(folder, stroke, style)


if __name__ == "__main__":
    main()
