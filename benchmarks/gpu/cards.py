"""The tables of docs/guide/hardware.md: for each family and card the cheapest flags with
which LoRA fits, or full training, and the peak, computed from shapes.

    python -m benchmarks.gpu.cards
    python -m benchmarks.gpu.cards check   exit status 1 where the page differs
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain import TrainConfig, TrainingModule
from dstrain.config import as_size
from dstrain.plugin import PlannedRun
from dstrain.registry import load_family
from dstrain.runs.dry_run.planned_rows import PlannedRows
from dstrain.runs.loaded_module import load_module
from dstrain.runs.resolve import resolve
from dstrain_planner.memory.advice import added_flags
from dstrain_planner.memory.counting import count
from dstrain_planner.memory.planning import MemoryPlan
from dstrain_planner.sizes import parse_size

PAGE = Path(__file__).parents[2] / "docs/guide/hardware.md"
CARDS = ("80GB", "48GB", "32GB", "24GB", "16GB", "12GB")
WAN: Mapping[str, Any] = MappingProxyType(
    {
        "model": "wan",
        "model_id_with_origin_paths": (
            "Wan-AI/Wan2.1-T2V-14B:diffusion_pytorch_model*.safetensors,"
            "Wan-AI/Wan2.1-T2V-14B:models_t5_umt5-xxl-enc-bf16.pth,"
            "Wan-AI/Wan2.1-T2V-14B:Wan2.1_VAE.pth"
        ),
        "height": 480,
        "width": 832,
        # It is on by default, and the rows say so.
        "use_gradient_checkpointing": False,
    }
)
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen-Image, 1024 x 1024": {
            "model": "qwen_image",
            "model_id_with_origin_paths": (
                "Qwen/Qwen-Image:transformer/*.safetensors,"
                "Qwen/Qwen-Image:text_encoder/*.safetensors,"
                "Qwen/Qwen-Image:vae/*.safetensors"
            ),
        },
        "FLUX.1 dev, 1024 x 1024": {
            "model": "flux",
            "model_id_with_origin_paths": (
                "black-forest-labs/FLUX.1-dev:transformer/*.safetensors,"
                "black-forest-labs/FLUX.1-dev:text_encoder/*.safetensors,"
                "black-forest-labs/FLUX.1-dev:text_encoder_2/*.safetensors,"
                "black-forest-labs/FLUX.1-dev:vae/*.safetensors"
            ),
        },
        "Wan 2.1 14B, 81 frames of 832 x 480": WAN,
        "Wan 2.1 14B, 33 frames of 832 x 480": {**WAN, "num_frames": 33},
        "SDXL, 1024 x 1024": {
            "model": "sdxl",
            "model_id": "stabilityai/stable-diffusion-xl-base-1.0",
        },
        "Z-Image, 1024 x 1024": {"model": "z_image", "model_id": "Tongyi-MAI/Z-Image"},
        "Z-Image-Omni, with an image to edit": {
            "model": "z_image",
            "model_id": "Tongyi-MAI/Z-Image-Omni-Base",
            "extra_inputs": "edit_image",
        },
        "Z-Image-Turbo, with its ControlNet": {
            "model": "z_image",
            "model_id": "PAI/Z-Image-Turbo-Fun-Controlnet-Union-2.1",
        },
        "FLUX.2 klein 4B, 1024 x 1024": {
            "model": "flux2",
            "model_id": "black-forest-labs/FLUX.2-klein-base-4B",
        },
        "FLUX.2 klein 9B, 1024 x 1024": {
            "model": "flux2",
            "model_id": "black-forest-labs/FLUX.2-klein-base-9B",
        },
        "FLUX.2 dev, 1024 x 1024": {
            "model": "flux2",
            "model_id": "black-forest-labs/FLUX.2-dev",
        },
    }
)
FULL_CARDS = ("192GB", "150GB", "80GB", "48GB", "24GB")
"""For full training, down to the first on which it does not fit."""
LORA_ALONE = ("33 frames", "with")
"""Models whose names have these words are in the first table alone."""

TABLE = """\
| model | card | stage 1 | peak | stage 2 | peak | weights in RAM |
|---|---|---|---|---|---|---|"""
LEFT_OUT = ("task", "feature_cache")
"""Options that every pair of stages has."""


def plan(flags: Mapping[str, Any]) -> MemoryPlan:
    """Plan LoRA of rank 32, or what the flags say, at batch 1, in bf16, from
    configurations alone.
    """
    trained = {} if {"trainable_models", "lora_rank"} & {*flags} else {"lora_rank": 32}
    config = TrainConfig(
        **flags,
        **trained,
        output_path=Path("output"),
        dry_run=True,
        device_memory="24GB",
    )
    setup = resolve(config)
    plans = [setup.plan(setup.all_inputs())]
    found = setup.find(plans, [])
    module = load_module(setup, plans, found, TrainingModule, empty=True)
    rows = PlannedRows(plans)
    run = PlannedRun.of(setup, plans, rows, (None, None), config, module)
    return MemoryPlan(run, count(run))


def row(model: str, run: MemoryPlan, card: str) -> str:
    """Return the row of a card."""
    return f"| {' | '.join((model, card, *_cells(run, card)))} |"


def _cells(run: MemoryPlan, card: str) -> tuple[str, str, str, str, str]:
    """Return the flags and the peak of both stages, and what the second has in RAM."""
    way = run.cheapest(parse_size("", card))
    if way is None:
        return "none known", "", "none known", "", ""
    if not way.is_split:
        found = run.estimate(way.config, "")
        return "one run", "", _flags(way.changes), as_size(found.peak), ""
    first, second = run.estimate_stages(way)
    ram = as_size(second.ram) if second.ram else ""
    return (
        _flags(way.stage_1),
        as_size(first.peak),
        _flags(way.changes),
        as_size(second.peak),
        ram,
    )


def _flags(changes: Mapping[str, Any]) -> str:
    own = {name: value for name, value in changes.items() if name not in LEFT_OUT}
    words = added_flags(own)
    return f"`{words}`" if words else ""


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield TABLE
    for model, flags in MODELS.items():
        run = plan(flags)
        for card in CARDS:
            yield row(model, run, card)
    yield TABLE
    for model, flags in MODELS.items():
        if any(words in model for words in LORA_ALONE):
            continue
        denoiser = load_family(flags["model"]).default_trainable
        run = plan({**flags, "trainable_models": denoiser})
        for card in FULL_CARDS:
            line = row(f"{model}, in full", run, card)
            yield line
            if "none known" in line:
                break


def main(words: Sequence[str]) -> int:
    """Print the table; with "check", compare it with that of the page."""
    page = PAGE.read_text().splitlines()
    differ = 0
    for line in rows():
        print(line, flush=True)
        if "check" in words and not {*line.splitlines()} <= {*page}:
            differ += 1
            print(f"is not in {PAGE.name}", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
