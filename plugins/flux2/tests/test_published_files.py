"""Published files are told by their places and by the names and shapes of their weights."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from dstrain.models import components_of
from dstrain.models.configs import infer_config
from dstrain_flux2 import BASE_4B, BASE_9B, DEV, KLEIN_4B, KLEIN_9B, MODEL
from transformers import Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from tests.support.layouts import PublishedFiles, layout_shapes

COMPONENTS = components_of(MODEL)
# The text encoder of FLUX.2-klein-4B, known as that of Z-Image, is not among those that
# DiffSynth-Studio lists for it.
QWEN_4B = "0f050f62a88876fea6eae0a18dac5a2e"
SIZES = {
    ("dit", DEV): 32_223_281_152,
    ("dit", KLEIN_4B): 3_875_544_576,
    ("dit", KLEIN_9B): 9_078_581_248,
}
"""Parameters of the published transformers."""


class TestPublishedFiles(PublishedFiles):
    family = MODEL
    files = (
        ("dit", DEV, None, "d38e1d5c5aec3b0a11e79327ac6e3b0f"),
        ("dit", KLEIN_4B, None, "3bde7b817fec8143028b6825a63180df"),
        ("dit", KLEIN_9B, None, "39c6fc48f07bebecedbbaa971ff466c8"),
        ("text_encoder", DEV, 0, "28fca3d8e5bf2a2d1271748a773f6757"),
        ("text_encoder", KLEIN_4B, None, QWEN_4B),
        ("text_encoder", KLEIN_9B, None, "9195f3ea256fcd0ae6d929c203470754"),
        ("vae", DEV, None, "c54288e3ee12ca215898840682337b95"),
    )
    told = tuple(
        (name, model_id)
        for name in ("dit", "text_encoder", "vae")
        for model_id in (DEV, KLEIN_4B, KLEIN_9B)
    )
    libraries = (
        ("dev", "dit", Flux2Transformer2DModel),
        ("dev", "text_encoder", Mistral3ForConditionalGeneration),
        ("klein", "text_encoder", Qwen3ForCausalLM),
        ("klein", "vae", AutoencoderKLFlux2),
    )
    places = (
        ("transformer/*.safetensors", "dit"),
        ("flux2-dev.safetensors", "dit"),
        ("flux-2-klein-4b.safetensors", "dit"),
        ("text_encoder/*.safetensors", "text_encoder"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
        ("ae.safetensors", "vae"),
    )

    def test_a_network_is_told_by_its_weights(self, told: Any) -> None:
        """Shapes are those of one published configuration."""
        component, published = (
            COMPONENTS[told[0]],
            COMPONENTS[told[0]].published[told[1]],
        )
        assert infer_config(component, layout_shapes(component, published)) == published


@pytest.mark.parametrize(("base", "klein"), [(BASE_4B, KLEIN_4B), (BASE_9B, KLEIN_9B)])
def test_a_base_model_has_the_layout_of_the_distilled_one(
    base: str, klein: str
) -> None:
    for component in COMPONENTS.values():
        published = component.published
        if published:
            assert published[base] == published[klein]


@pytest.mark.parametrize(("name", "model_id"), SIZES)
def test_a_transformer_has_the_published_size(name: str, model_id: str) -> None:
    shapes = layout_shapes(COMPONENTS[name], COMPONENTS[name].published[model_id])
    size = sum(torch.Size(one).numel() for one in shapes.values())
    assert size == SIZES[name, model_id]


def test_the_states_that_are_read_are_the_published_ones() -> None:
    """The layers by their numbers (text_encoder.py of black-forest-labs/flux2, and
    Flux2KleinPipeline of diffusers), and what is in no loss after them.
    """
    for variant, model_id, last, depth in (
        ("dev", DEV, 30, 40),
        ("klein", KLEIN_9B, 27, 36),
    ):
        component = COMPONENTS["text_encoder"]
        config = component.configure(component.published[model_id])
        own = config.get_text_config().num_hidden_layers
        assert [own * quarter // 4 for quarter in (1, 2, 3)] == [
            last // 3,
            last // 3 * 2,
            last,
        ]
        assert own == depth
        patterns = MODEL.spec(variant).unused_parameters["text_encoder"]
        named = [one.split(".")[-2] for one in patterns if "layers." in one]
        assert named == [*map(str, range(last, depth)), "{last}"]
