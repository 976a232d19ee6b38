"""Z-Image's components, and toys of them: dropout tells an encoder in training mode."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dstrain.plugin as plugin

from dstrain_z_image import OMNI, TURBO

CONFIGS = Path(__file__).parent / "configs"
KEY_MAPS = plugin.read_key_maps(CONFIGS / "key_maps.json")
PUBLISHED = json.loads((CONFIGS / "published.json").read_bytes())
"""Component -> model id -> content of its config.json."""


def infer_dit(shapes: plugin.Shapes) -> Mapping[str, Any] | None:
    """Return the published configuration, of any depth, with SigLIP or without."""
    name = OMNI if "siglip_pad_token" in shapes else TURBO
    config = PUBLISHED["dit"][name]
    blocks = {one.split(".")[1] for one in shapes if one.startswith("layers.")}
    is_wide = shapes.get("x_pad_token") == (1, config["dim"])
    return {**config, "n_layers": len(blocks)} if is_wide else None


class ControlNetwork(plugin.DiffusersNetwork):
    """That of version 2.1: one of 2.0 has its names, with zeros where it has none."""

    def load(self, *given: Any) -> Any:
        """Build and fill it; raises InputError for one of 2.0."""
        network = super().load(*given)
        if not network.control_noise_refiner[0].before_proj.weight.any():
            raise plugin.InputError("controlnet", "is of version 2.0; give one of 2.1")
        return network


Diffusers, Transformers = plugin.DiffusersNetwork, plugin.TransformersNetwork
NETWORKS = {
    "dit": Diffusers("ZImageTransformer2DModel"),
    "controlnet": ControlNetwork("dstrain_z_image.controlnet:ControlNet"),
    "text_encoder": Transformers("Qwen3ForCausalLM", "Qwen3Config"),
    "image_encoder": Transformers("Siglip2VisionModel", "Siglip2VisionConfig"),
    "vae": Diffusers("AutoencoderKL"),
    "tokenizer": plugin.Tokenizer("Qwen2Tokenizer"),
}
COMPONENTS = tuple(
    plugin.Component(
        name,
        network=network,
        version=1,
        default_configs=PUBLISHED.get(name, {}),
        infer=infer_dit if name == "dit" else None,
        **KEY_MAPS[name],
    )
    for name, network in NETWORKS.items()
)
TOY = json.loads((CONFIGS / "toy.json").read_bytes())
write_toy = plugin.toy_writer(COMPONENTS, **TOY)
