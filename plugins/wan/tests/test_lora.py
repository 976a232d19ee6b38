"""A LoRA file goes into the right transformer, here and by diffusers' own loader, with
equal predictions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from dstrain import LoraConfig, Pipeline, save_lora
from dstrain.lora import inject
from dstrain_wan import MODEL
from torch import Tensor

CASES = [(variant, "dit") for variant in MODEL.variants] + [
    ("t2v-a14b", "dit2"),
    ("i2v-a14b", "dit2"),
]
EXPERTS = ("dit", "dit2")


@torch.no_grad()
def prediction(dit: Any) -> Tensor:
    """What a transformer of any variant makes of some latents and conditions."""
    draw = torch.Generator().manual_seed(3)
    ends = 2 if dit.config.pos_embed_seq_len else 1
    seen = torch.randn(ends, 5, 16, generator=draw) if dit.config.image_dim else None
    latents = torch.randn(1, dit.config.in_channels, 2, 4, 6, generator=draw)
    text = torch.randn(1, 512, 32, generator=draw)
    made: Tensor = dit(latents, torch.tensor([500.0]), text, seen, return_dict=False)[0]
    return made


# For i2v, diffusers adds layers of zeros to those of the file.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
@pytest.mark.parametrize(("variant", "part"), CASES)
def test_a_file_acts_on_its_expert_alone_here_and_in_diffusers(
    variant: str,
    part: str,
    bind_components: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    trained, ours, theirs = (
        bind_components(variant),
        bind_components(variant),
        bind_components(variant),
    )
    lora_config = LoraConfig(part, MODEL.lora_targets[part], 4, 6.0)
    torch.manual_seed(0)
    inject(trained[part], lora_config, MODEL.lora_aliases)
    with torch.no_grad():
        for name, weight in trained[part].named_parameters():
            if "lora_B" in name:
                weight.normal_()
    save_lora(
        tmp_path / "lora.safetensors",
        trained[part],
        lora_config,
        MODEL.lora_prefixes[part],
        {},
    )
    Pipeline(
        MODEL.spec(variant),
        MODEL,
        {name: ours[name] for name in MODEL.spec(variant).components},
    ).load_lora(tmp_path / "lora.safetensors")
    parts = {name: theirs[name] for name in ("text_encoder", "tokenizer", "vae")}
    published = WanPipeline(
        **parts,
        scheduler=None,
        transformer=theirs["dit"],
        transformer_2=theirs.get("dit2"),
    )
    published.load_lora_weights(
        tmp_path, weight_name="lora.safetensors", load_into_transformer_2=part == "dit2"
    )
    plain = bind_components(variant)[part]
    assert not torch.equal(prediction(trained[part]), prediction(plain))
    for name in EXPERTS:
        if name in trained:
            wanted = prediction(trained[name])
            # alpha / rank is part of the saved B, rounded to fp32.
            most = 1e-5 * wanted.abs().max() if name == part else 0.0
            assert (prediction(ours[name]) - wanted).abs().max() <= most
            assert (prediction(theirs[name]) - wanted).abs().max() <= most
