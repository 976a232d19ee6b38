"""The networks have, at published sizes, the names and shapes of published files."""

from typing import Any

import pytest
from dstrain_qwen_image.components import COMPONENTS, CONFIGS

from tests.support.layouts import layout_digest

BY_NAME = {component.name: component for component in COMPONENTS}
CONTROLNET = "DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-"
CONTROLNETS = BY_NAME["blockwise_controlnet"].published


@pytest.mark.parametrize(
    ("component", "config", "digest"),
    [
        ("dit", CONFIGS / "dit.json", "0319a1cb19835fb510907dd3367c95ff"),
        ("vae", CONFIGS / "vae.json", "ed4ea5824d55ec3107b09815e318123a"),
        ("dit", CONFIGS / "dit_layered.json", "8dc8cda05de16c73afa755e2c1ce2839"),
        ("vae", CONFIGS / "vae_layered.json", "44b39ddc499e027cfb24f7878d7416b9"),
        (
            "blockwise_controlnet",
            CONTROLNETS[f"{CONTROLNET}Depth"],
            "073bce9cf969e317e5662cd570c3e79c",
        ),
        (
            "blockwise_controlnet",
            CONTROLNETS[f"{CONTROLNET}Inpaint"],
            "a9e54e480a628f0b956a688a81c33bab",
        ),
    ],
)
def test_a_published_layout_is_that_of_the_network(
    component: str, config: Any, digest: str
) -> None:
    assert layout_digest(BY_NAME[component], config) == digest


def test_the_text_encoder_is_published_in_the_names_of_transformers_4() -> None:
    text_encoder = BY_NAME["text_encoder"]
    (published,) = text_encoder.formats
    assert (
        layout_digest(text_encoder, CONFIGS / "text_encoder.json", published)
        == "8004730443f55db63092006dd9f7110e"
    )
