"""The table of docs/guide/hardware.md: for each family and card the cheapest flags with
which LoRA fits, and the peak, computed from shapes.

    python -m benchmarks.gpu.cards
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config.options.train import TrainConfig
from dstrain.config.sizes import as_size, parse_size
from dstrain.graph.plan import Plan
from dstrain.runs.build import load_module
from dstrain.runs.memory.advice import Way, added_flags, cheapest
from dstrain.runs.memory.estimate import RESERVE, Estimate
from dstrain.runs.memory.facts import Facts, facts_of
from dstrain.runs.memory.report import estimate_way, planned, possible_ways
from dstrain.runs.resolve import resolve
from dstrain.runs.setup import Setup
from dstrain.training.module import TrainingModule

CARDS = ("80GB", "48GB", "32GB", "24GB", "16GB", "12GB")
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
        "Wan 2.1 14B, 81 frames of 832 x 480": {
            "model": "wan",
            "model_id_with_origin_paths": (
                "Wan-AI/Wan2.1-T2V-14B:diffusion_pytorch_model*.safetensors,"
                "Wan-AI/Wan2.1-T2V-14B:models_t5_umt5-xxl-enc-bf16.pth,"
                "Wan-AI/Wan2.1-T2V-14B:Wan2.1_VAE.pth"
            ),
            "height": 480,
            "width": 832,
        },
    }
)


@dataclass(frozen=True)
class Planned:
    """A run that is planned."""

    setup: Setup
    plans: list[Plan]
    facts: Facts

    def estimate(self, way: Way) -> Estimate:
        """Estimate the stage that trains."""
        return estimate_way(self.setup, self.plans, self.facts, way, "train")


def plan(flags: Mapping[str, Any]) -> Planned:
    """Plan LoRA of rank 32 at batch 1, in bf16, from configurations alone."""
    config = TrainConfig(
        **flags,
        lora_rank=32,
        output_path=Path("output"),
        dry_run=True,
        device_memory="24GB",
    )
    setup = planned(resolve(config))
    plans = [setup.plan(setup.all_inputs())]
    found = setup.find(plans, [])
    module = load_module(setup, plans, found, TrainingModule, empty=True)
    return Planned(setup, plans, facts_of(setup, plans, module, None, None))


def rows(one: Planned) -> Iterator[tuple[str, str, str, str]]:
    """Yield card, flags, peak on the device and weights in RAM."""
    for card in CARDS:
        size = parse_size("", card)
        possible = possible_ways(one.setup, one.plans, one.facts)
        way = cheapest(
            one.setup.config,
            possible,
            lambda way, size=size: way.is_split and one.estimate(way).fits(size),
        )
        if way is None:
            yield card, "none known", "", ""
            continue
        found = one.estimate(way)
        yield (
            card,
            f"`{added_flags(way)}`",
            as_size(found.least + RESERVE),
            as_size(found.ram),
        )


def main() -> None:
    """Print the table."""
    print("| model | card | flags | peak | weights in RAM |\n|---|---|---|---|---|")
    for model, flags in MODELS.items():
        for row in rows(plan(flags)):
            print("| " + " | ".join((model, *row)) + " |")


if __name__ == "__main__":
    main()
