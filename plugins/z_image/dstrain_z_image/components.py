"""Z-Image's components: how their files are recognized, configured and loaded."""

from pathlib import Path

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
)

from dstrain_z_image import IDS

CONFIGS = Path(__file__).parent / "configs"
KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json")

COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("ZImageTransformer2DModel"),
        folder="transformer",
        version=1,
        default_configs=dict.fromkeys(IDS, CONFIGS / "dit.json"),
        as_loaded=(
            *("t_embedder.*", "cap_embedder.*", "all_x_embedder.*"),
            "all_final_layer.*",
        ),
        modulation=("adaLN_modulation.0",),
        **KEY_MAPS["dit"],
    ),
    Component(
        "text_encoder",
        network=TransformersNetwork("Qwen3ForCausalLM", "Qwen3Config"),
        folder="text_encoder",
        version=1,
        default_configs=dict.fromkeys(IDS, CONFIGS / "text_encoder.json"),
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKL"),
        folder="vae",
        version=1,
        default_configs=dict.fromkeys(IDS, CONFIGS / "vae.json"),
        **KEY_MAPS["vae"],
    ),
    Component(
        "tokenizer", network=Tokenizer("Qwen2Tokenizer"), folder="tokenizer", version=1
    ),
)
