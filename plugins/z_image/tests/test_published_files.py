"""Published files are told by their places and by the names and shapes of their weights."""

import pytest
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from dstrain.models import components_of
from dstrain.models.configs import infer_config
from dstrain_z_image import CONTROLNETS, MODEL
from transformers import Qwen3ForCausalLM

from tests.support.layouts import PublishedFiles, digest_of, layout_shapes
from tests.support.toys import toy

COMPONENTS = components_of(MODEL)
TURBO = "Tongyi-MAI/Z-Image-Turbo"
OMNI = "Tongyi-MAI/Z-Image-Omni-Base"
UNION, _ = CONTROLNETS
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
}
"""Where Qwen/Qwen3-0.6B is not the published text encoder (its config.json)."""


class TestPublishedFiles(PublishedFiles):
    family = MODEL
    files = (
        ("dit", TURBO, None, "fc3a8a1247fe185ce116ccbe0e426c28"),
        ("dit", OMNI, None, "aa3563718e5c3ecde3dfbb020ca61180"),
        ("text_encoder", TURBO, None, "0f050f62a88876fea6eae0a18dac5a2e"),
        ("vae", TURBO, None, "1aafa3cc91716fb6b300cc1cd51b85a3"),
        ("image_encoder", OMNI, 0, "89d48e420f45cff95115a9f3e698d44a"),
        ("controlnet", UNION, None, "1677708d40029ab380a95f6c731a57d7"),
    )
    told = tuple((name, model_id) for name, model_id, _, _ in files)
    libraries = (
        ("base", "dit", ZImageTransformer2DModel),
        ("base", "text_encoder", Qwen3ForCausalLM),
        ("base", "vae", AutoencoderKL),
    )
    places = (
        ("transformer/*.safetensors", "dit"),
        ("siglip/model.safetensors", "image_encoder"),
        ("text_encoder/*.safetensors", "text_encoder"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
        ("Z-Image-Turbo-Fun-Controlnet-Union-2.1.safetensors", "controlnet"),
        ("Z-Image-Turbo-Fun-Controlnet-Tile-2.1-8steps.safetensors", "controlnet"),
    )


def test_a_transformer_of_other_programs_has_a_prefix() -> None:
    shapes = layout_shapes(COMPONENTS["dit"], COMPONENTS["dit"].published[TURBO])
    prefixed = {f"model.diffusion_model.{name}": one for name, one in shapes.items()}
    assert digest_of(prefixed) == "8cf241a0d32f93d5de368502a086852f"


def test_a_small_text_encoder_has_its_head_beside_the_embedding() -> None:
    component = COMPONENTS["text_encoder"]
    shapes = layout_shapes(component, {**component.published[TURBO], **QWEN3_06B})
    head = {"lm_head.weight": shapes["model.embed_tokens.weight"]}
    assert digest_of({**shapes, **head}) == "1392adecee344136041e70553f875f31"


@pytest.mark.parametrize("name", ["dit", "controlnet"])
def test_a_network_of_other_sizes_needs_its_configuration(name: str) -> None:
    component = COMPONENTS[name]
    config = toy("z_image", "controlnet-union") / component.folder / "config.json"
    assert infer_config(component, layout_shapes(component, config)) is None
