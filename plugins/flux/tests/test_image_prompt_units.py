"""Images as prompts: pixels are those of diffusers' processor; SigLIP's files are not taken
for CLIP's.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from dstrain.models import recognize
from dstrain.plugin import Files
from dstrain_flux.components import COMPONENTS, vision_config
from dstrain_flux.image_prompt_units import square_pixels
from PIL import Image
from safetensors.torch import save_file
from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BY_NAME = {component.name: component for component in COMPONENTS}


def test_pixels_are_those_of_the_published_processor() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    encoder = SimpleNamespace(config=SimpleNamespace(image_size=28))
    processor = SiglipImageProcessor(size={"height": 28, "width": 28})
    theirs = processor(images=[image], return_tensors="pt").pixel_values
    assert torch.allclose(square_pixels([image], encoder), theirs, atol=1e-6)


def test_a_whole_siglip_is_recognized_by_its_vision_half_alone(tmp_path: Path) -> None:
    texts = {"vocab_size": 40, "max_position_embeddings": 8}
    ids = {"bos_token_id": None, "eos_token_id": None}
    sides = {"image_size": 28, "patch_size": 14}
    config = SiglipConfig(
        text_config={**SMALL, **texts, **ids}, vision_config={**SMALL, **sides}
    )
    whole = SiglipModel(config)
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    component = BY_NAME["image_encoder"]
    (((found,), files),) = recognize(
        Files((tmp_path / "model.safetensors",)), COMPONENTS
    )
    assert found is component
    content = vision_config(config.to_dict(), {})
    assert content is not None
    loaded = component.network.load(files, component.configure(content), torch.float32)
    theirs = whole.vision_model.state_dict()
    assert loaded.state_dict().keys() == theirs.keys()
    assert all(
        torch.equal(one, theirs[name]) for name, one in loaded.state_dict().items()
    )
