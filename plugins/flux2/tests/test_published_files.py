"""Published files are told by their places and by the names and shapes of their weights."""

from fnmatch import fnmatch

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from dstrain.models import components_of
from dstrain_flux2 import BASE_4B, BASE_9B, DEV, KLEIN_4B, KLEIN_9B, MODEL
from transformers import Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from tests.support.layouts import PublishedFiles, layout_shapes
from tests.support.toys import opened

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


def test_what_shapes_do_not_tell_is_as_published() -> None:
    """Flux2TextEncoder of DiffSynth-Studio's diffsynth/models, Qwen3's configuration in its
    z_image_text_encoder.py, and the defaults of diffusers' VAE.
    """
    published = COMPONENTS["text_encoder"].published
    mistral = published[DEV]
    assert mistral["text_config"]["rope_theta"] == 1e9
    assert mistral["text_config"]["rms_norm_eps"] == 1e-5
    assert mistral["vision_config"]["rope_theta"] == 1e4
    for model_id in (KLEIN_4B, KLEIN_9B):
        assert published[model_id]["rope_theta"] == 1e6
        assert published[model_id]["rms_norm_eps"] == 1e-6
    transformer = COMPONENTS["dit"].published[DEV]
    assert transformer["rope_theta"] == 2000
    assert transformer["axes_dims_rope"] == [32, 32, 32, 32]
    assert COMPONENTS["vae"].configure({}).batch_norm_eps == 1e-4


def test_layers_that_are_special_are_these() -> None:
    dit = opened("flux2", "dev").components["dit"]
    linear = [
        name for name, one in dit.named_modules() if isinstance(one, torch.nn.Linear)
    ]
    found = {
        kind: {name for name in linear if any(fnmatch(name, one) for one in patterns)}
        for kind, patterns in (
            ("as_loaded", COMPONENTS["dit"].as_loaded),
            ("modulation", COMPONENTS["dit"].modulation),
        )
    }
    streams = ("double_stream_modulation_img", "double_stream_modulation_txt")
    wanted = {f"{one}.linear" for one in (*streams, "single_stream_modulation")}
    assert found["modulation"] == wanted
    blocks = {name for name in linear if "_blocks." in name}
    assert found["as_loaded"] == set(linear) - blocks - wanted
    assert COMPONENTS["text_encoder"].as_loaded == ("lm_head",)
