"""FLUX.2's components: how their files are recognized, configured and loaded, and toys of
them, with random weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
    toy_writer,
)
from torch import nn

from dstrain_flux2 import PUBLISHED

CONFIGS = Path(__file__).parent / "configs"
KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json")
MISTRAL = TransformersNetwork("Mistral3ForConditionalGeneration", "Mistral3Config")
QWEN = TransformersNetwork("Qwen3ForCausalLM", "Qwen3Config")
ENCODERS = {"mistral3": MISTRAL, "qwen3": QWEN}


class TextEncoder(TransformersNetwork):
    """The text encoder that its config.json says."""

    def accepts_config(self, data: Mapping[str, Any]) -> bool:
        """Return whether the content of a `config.json` is that of one of them."""
        return data.get("model_type") in ENCODERS

    def configure(self, data: Mapping[str, Any]) -> Any:
        """Return the content of `config.json` as the configuration record."""
        return ENCODERS[data["model_type"]].configure(data)

    def build(self, configuration: Any) -> nn.Module:
        """Build the network for a configuration record, its weights random."""
        return ENCODERS[configuration.model_type].build(configuration)


def configs(component: str) -> dict[str, Path]:
    """Return the files of a component's published configurations, by model id."""
    folder = CONFIGS / component
    return {one: folder / f"{Path(own).name}.json" for one, own in PUBLISHED.items()}


COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("Flux2Transformer2DModel"),
        version=1,
        default_configs=configs("dit"),
        **KEY_MAPS["dit"],
    ),
    Component(
        "text_encoder",
        network=TextEncoder("", ""),
        version=1,
        default_configs=configs("text_encoder"),
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKLFlux2"),
        version=1,
        default_configs={model_id: {} for model_id in PUBLISHED},
        **KEY_MAPS["vae"],
    ),
    Component(
        "tokenizer",
        network=Tokenizer("PreTrainedTokenizerFast"),
        folder="tokenizer",
        version=1,
    ),
)
TOY = json.loads((CONFIGS / "toy.json").read_bytes())
write_toy = toy_writer(COMPONENTS, **TOY)
