"""R19: what a user compares with is equal: the scheduler in a toy's folder takes the
steps of dstrain, and so does a published pipeline after the lines of the docs.
"""

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from dstrain import Pipeline
from dstrain.models import write_toy
from dstrain.pipeline import seeded_noise
from dstrain.pipeline.sampler import maker_of
from dstrain.registry import load_family
from torch import Tensor

from tests.support import ROOT

pytestmark = pytest.mark.promise(
    "R19", "what a user compares with in diffusers takes the same steps"
)

LATENTS_PER_SIDE = 8
PIXELS_PER_TOKEN = {"flux2": 16}
"""Family -> pixels of a token's side, where latents are not as many as the others'."""
VARIANTS = [
    (family, variant)
    for family in ("flux", "flux2", "qwen_image", "sdxl", "wan", "z_image")
    for variant in load_family(family).variants
]


def scheduler_in(folder: Path) -> Any:
    """The scheduler that diffusers' pipeline of this folder has."""
    index = json.loads((folder / "model_index.json").read_text())
    library, name = index["scheduler"]
    assert library == "diffusers"
    return getattr(diffusers, name).from_pretrained(folder / "scheduler")


def set_as_its_pipeline_does(
    family: str, scheduler: Any, steps: int, tokens: int
) -> None:
    """Wan's pipelines give the number of steps; the others sigmas, and mu where it acts."""
    config = scheduler.config
    if not isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        scheduler.set_timesteps(steps)
        return
    if not config.use_dynamic_shifting:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        return
    if family == "flux2":
        mu = compute_empirical_mu(tokens, steps)
    elif config.time_shift_type == "linear":  # as QwenImageLayeredPipeline does
        mu = math.sqrt(tokens / config.base_image_seq_len)
    else:
        mu = calculate_shift(
            tokens,
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # diffusers, numpy 2
@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_the_scheduler_of_a_toy_has_the_timesteps_of_the_familys_defaults(
    family: str, variant: str, tmp_path: Path
) -> None:
    loaded = load_family(family)
    write_toy(loaded, variant, tmp_path)
    spec = loaded.spec(variant)
    steps = spec.defaults["num_inference_steps"]
    sides = [spec.defaults.get(name, 1024) for name in ("height", "width")]
    pixels = PIXELS_PER_TOKEN.get(family, LATENTS_PER_SIDE)
    latents = math.prod(side // pixels for side in sides)
    tokens = latents // getattr(spec.schedule, "latents_per_token", 1)
    scheduler = scheduler_in(tmp_path)
    set_as_its_pipeline_does(family, scheduler, steps, tokens)
    sampler = maker_of(spec, spec.defaults.get("sampler", "euler"))(
        spec.schedule, steps, tokens, torch.Generator()
    )
    ours = sampler.timesteps[:-1]
    assert torch.allclose(scheduler.timesteps.float(), ours, rtol=0, atol=2e-4)


def test_the_lines_of_wans_page_make_diffusers_latents_equal(empty: Path) -> None:
    page = (ROOT / "docs/guide/families/wan.md").read_text()
    section = page.partition("## Comparing with diffusers")[2]
    (lines,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    toy = write_toy(load_family("wan"), "t2v", empty / "models/wan-toy")
    (empty / "lines.py").write_text(lines)
    published = runpy.run_path("lines.py")["pipe"]
    published.set_progress_bar_config(disable=True)
    pipe = Pipeline.from_pretrained("wan", toy, "t2v", device="cpu")
    arguments: dict[str, Any] = {
        "prompt": "a dog runs",
        "negative_prompt": "a cat",
        "height": 32,
        "width": 48,
        "num_frames": 5,
        "num_inference_steps": 6,
        "guidance_scale": 5.0,
        "latents": seeded_noise((1, 16, 2, 4, 6), 3),
    }
    ours: list[Tensor] = []
    pipe(**arguments, on_step=lambda _, latents: ours.append(latents.clone()))
    theirs: list[Tensor] = []

    def note(_: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        theirs.append(values["latents"].clone())
        return values

    published(**arguments, output_type="latent", callback_on_step_end=note)
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-5)
