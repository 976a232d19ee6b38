"""What the model of a project has generated for a student of it."""

import json
from pathlib import Path

import torch
from dstrain.pipeline import inference_sigmas
from dstrain.storage import write_tensors
from dstrain.training.losses import LATENTS, SIGMAS

from tests.support.runs import opened, project

PROMPTS = ("dog", "two dogs on a bridge", "cat", "dog and cat", "a", "")


def distillable(
    folder: Path,
    steps: tuple[int, ...] = (2, 2, 1, 2, 2, 1),
    times: int = 2,
    scale: float = 1.0,
) -> Path:
    """A project whose own model has made the images and trajectories below `made` in
    `times` as many steps as a student takes, with guidance of this scale.
    """
    project(folder)
    pipe = opened(folder / "model")
    (folder / "made/trajectory").mkdir(parents=True)
    rows = []
    for seed, (prompt, count) in enumerate(zip(PROMPTS, steps, strict=True)):
        noise = torch.randn((1, 4, 2, 2), generator=torch.Generator().manual_seed(seed))
        states = [noise]
        image = pipe(
            prompt=prompt,
            guidance_scale=scale,
            num_inference_steps=times * count,
            latents=noise,
            on_step=lambda step, latents, states=states: states.append(latents),
        )
        row = {"image": f"{seed}.png", "trajectory": f"trajectory/{seed}.safetensors"}
        image.save(folder / "made" / row["image"])
        sigmas = inference_sigmas(pipe.spec.schedule, noise, count)[None]
        tensors = {LATENTS: torch.stack(states[::times], dim=1), SIGMAS: sigmas}
        write_tensors(folder / "made" / row["trajectory"], tensors, {}, checksum=True)
        rows.append(
            {**row, "prompt": prompt, "seed": seed, "num_inference_steps": count}
        )
    table = folder / "made/metadata.json"
    table.write_text(json.dumps(rows))
    return folder
