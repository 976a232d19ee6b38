"""Files of published models have the names and shapes of weights that these layouts have
at published sizes.
"""

from pathlib import Path

import pytest
from dstrain.models import NATIVE
from dstrain.plugin import CheckpointFormat, Files
from dstrain_wan.components import COMPONENTS

from tests.support.layouts import digest_of, layout_digest, layout_shapes

BY_NAME = {component.name: component for component in COMPONENTS}
FILES = Files((Path("model.safetensors"),))
# The digests as DiffSynth-Studio lists published files.
TRANSFORMERS = {
    "Wan-AI/Wan2.1-T2V-1.3B": "9269f8db9040a9d860eaca435be61814",
    "Wan-AI/Wan2.1-T2V-14B": "aafcfd9672c3a2456dc46e1cb6e52c70",
    "Wan-AI/Wan2.1-I2V-14B-480P": "6bfcfb3b342cb286ce886889d519a77e",
    "Wan-AI/Wan2.1-FLF2V-14B-720P": "3ef3b1f8e1dab83d5b71fd7b617f859f",
    "PAI/Wan2.1-Fun-1.3B-InP": "6d6ccde6845b95ad9114ab993d917893",
    "PAI/Wan2.1-Fun-14B-InP": "6bfcfb3b342cb286ce886889d519a77e",
    "PAI/Wan2.1-Fun-1.3B-Control": "349723183fc063b2bfc10bb2835cf677",
    "PAI/Wan2.1-Fun-14B-Control": "efa44cddf936c70abd0ea28b6cbe946c",
    "PAI/Wan2.1-Fun-V1.1-1.3B-Control": "70ddad9d3a133785da5ea371aae09504",
    "PAI/Wan2.1-Fun-V1.1-14B-Control": "26bde73488a92e64cc20b0a7485b9e5b",
    "PAI/Wan2.1-Fun-V1.1-1.3B-Control-Camera": "ac6a5aa74f4a0aab6f64eb9a72f19901",
    "PAI/Wan2.1-Fun-V1.1-14B-Control-Camera": "b61c605c2adbd23124d152ed28e049ae",
    "PAI/Wan2.2-Fun-A14B-Control": "2267d489f0ceb9f21836532952852ee5",
    "PAI/Wan2.2-Fun-A14B-Control-Camera": "47dbeab5e560db3180adf51dc0232fb1",
    "Wan-AI/Wan2.2-I2V-A14B": "5b013604280dd715f8457c6ed6d6a626",
    "Wan-AI/Wan2.2-TI2V-5B": "1f5ab7703c6fc803fdded85ff040c316",
}


@pytest.mark.parametrize("model_id", TRANSFORMERS)
def test_transformers(model_id: str) -> None:
    dit = BY_NAME["dit"]
    made = layout_digest(dit, dit.published[model_id], dit.formats[0])
    assert made == TRANSFORMERS[model_id]


def test_the_transformer_of_krea_has_a_prefix() -> None:
    dit = BY_NAME["dit"]
    config = dit.published["krea/krea-realtime-video"]
    shapes = layout_shapes(dit, config, dit.formats[0])
    named = {f"model.{name}": shape for name, shape in shapes.items()}
    assert digest_of(named) == "5ec04e02b42d2580483ad69f4e76346a"
    part = dit.part_of(FILES, list(named))
    assert part is not None
    assert (part.prefix, part.checkpoint_format) == ("model.", dit.formats[0])


@pytest.mark.parametrize(
    ("model_id", "digest"),
    [
        ("iic/VACE-Wan2.1-1.3B-Preview", "a61453409b67cd3246cf0c3bebad47ba"),
        ("Wan-AI/Wan2.1-VACE-14B", "7a513e1f257a861512b1afd387a8ecd9"),
    ],
)
def test_one_file_has_the_denoiser_and_vace(model_id: str, digest: str) -> None:
    shapes = {}
    for name in ("dit", "vace"):
        one = BY_NAME[name]
        shapes |= layout_shapes(one, one.published[model_id], one.formats[0])
    assert digest_of(shapes) == digest


@pytest.mark.parametrize(
    ("name", "model_id", "checkpoint_format", "digest"),
    [
        (
            "motion_controller",
            "DiffSynth-Studio/Wan2.1-1.3b-speedcontrol-v1",
            NATIVE,
            "dbd5ec76bbf977983f972c151d545389",
        ),
        (
            "vae",
            "Wan-AI/Wan2.1-T2V-14B",
            BY_NAME["vae"].formats[1],
            "ccc42284ea13e1ad04693284c7a09be6",
        ),
        (
            "vae",
            "Wan-AI/Wan2.2-TI2V-5B",
            BY_NAME["vae"].formats[0],
            "e1de6c02cdac79f8b739f4d3698cd216",
        ),
        (
            "text_encoder",
            "Wan-AI/Wan2.1-T2V-14B",
            BY_NAME["text_encoder"].formats[0],
            "9c8818c2cbea55eca56c7b447df170da",
        ),
    ],
)
def test_other_networks(
    name: str, model_id: str, checkpoint_format: CheckpointFormat, digest: str
) -> None:
    component = BY_NAME[name]
    made = layout_digest(component, component.published[model_id], checkpoint_format)
    assert made == digest
