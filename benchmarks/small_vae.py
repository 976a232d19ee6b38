"""Train the small VAE of a family on the demo's digits."""

import json
from pathlib import Path
from typing import Any

import torch
from dstrain.lazy import import_name
from torch import Tensor, nn
from torch.nn import functional

BATCH, RATE, KL_WEIGHT = 8, 2e-3, 1e-5
"""Images of a step, the highest learning rate, and the weight of the divergence."""


def in_two_looks(stroke: Tensor) -> Tensor:
    """Paint digits, (batch, height, width) in 0..1, in one of the two looks each; return
    (batch, 3, height, width) in -1..1.
    """
    from digits import LOOK, PLAIN

    chosen = torch.randint(2, (len(stroke),))
    ink, paper = (
        (torch.tensor([PLAIN[part], LOOK[part]])[chosen] / 127.5 - 1)[:, :, None, None]
        for part in (0, 1)
    )
    return torch.lerp(paper, ink, stroke[:, None])


def train_vae(folder: Path, stroke: Tensor, steps: int) -> None:
    """Train the VAE of a folder on digits, (count, height, width): on parts of images,
    and for the last quarter of the steps on whole ones.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    vae: Any = import_name("diffusers", config["_class_name"]).from_pretrained(folder)
    vae.train()
    # The half that is the log-variance: latents with a noise of 1 would first have to
    # unlearn it.
    last = vae.encoder.conv_out if vae.quant_conv is None else vae.quant_conv
    nn.init.constant_(last.bias[vae.config.latent_channels :], -4.0)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps, pct_start=0.1
    )
    whole = stroke.shape[-1]
    for step in range(1, steps + 1):
        side = whole // 2 if step <= 0.75 * steps else whole
        top, left = torch.randint(whole - side + 1, (2,)).tolist()
        rows = torch.randint(len(stroke), (BATCH,))
        image = in_two_looks(stroke[rows, top : top + side, left : left + side])
        latents = vae.encode(image).latent_dist
        error = vae.decode(latents.sample()).sample - image
        divergence = 0.5 * (latents.mean**2 + latents.var - 1 - latents.logvar)
        optimizer.zero_grad()
        (error.abs().mean() + KL_WEIGHT * divergence.mean()).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    vae.eval()
    parts = [in_two_looks(part) for part in stroke.split(64)]
    with torch.no_grad():
        latents = [vae.encode(part).latent_dist.mode() for part in parts]
        standardize(vae, torch.cat(latents))
    vae.save_pretrained(folder)


def standardize(vae: Any, latents: Tensor) -> None:
    """Give latents, (count, channels, height, width), a mean of 0 and a deviation of 1,
    where the VAE's class has the numbers for it.
    """
    if hasattr(vae, "bn"):
        # FLUX.2's latents are counted in squares of four.
        squares = functional.pixel_unshuffle(latents, 2)
        vae.bn.running_mean.copy_(squares.mean((0, 2, 3)))
        vae.bn.running_var.copy_(squares.var((0, 2, 3)))
        return
    mean = float(latents.mean())
    if vae.config.shift_factor is not None:
        vae.register_to_config(shift_factor=mean)
    elif vae.quant_conv is not None:
        # SDXL's has no such number: its convolutions of one pixel move the latents.
        channels = latents.shape[1]
        vae.quant_conv.bias[:channels] -= mean
        moved = torch.full((1, channels, 1, 1), mean)
        bias = vae.post_quant_conv.bias
        bias += vae.post_quant_conv(moved)[0, :, 0, 0] - bias
    vae.register_to_config(scaling_factor=1 / float(latents.std()))
