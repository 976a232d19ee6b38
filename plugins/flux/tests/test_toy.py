"""The toy has the published layout, and diffusers loads it."""

import pytest
from diffusers import DiffusionPipeline
from dstrain_flux import MODEL
from transformers import AutoTokenizer

from tests.support.toys import toy

OWN = ("controlnet-inpaint",)
"""Variants with a network that diffusers lacks."""
KINDS = {
    "kontext": "FluxKontextPipeline",
    "fill": "FluxFillPipeline",
    "controlnet": "FluxControlNetPipeline",
    "controlnet-union": "FluxControlNetPipeline",
}


@pytest.mark.filterwarnings("default", "ignore:`FluxPosEmbed`:FutureWarning")
@pytest.mark.parametrize("variant", [one for one in MODEL.variants if one not in OWN])
def test_diffusers_loads_the_folder_as_its_own_pipeline(variant: str) -> None:
    pipeline = DiffusionPipeline.from_pretrained(toy("flux", variant))
    assert type(pipeline).__name__ == KINDS.get(variant, "FluxPipeline")
    assert pipeline.tokenizer_max_length == 77
    assert pipeline.text_encoder.config.attention_dropout == 0.1
    assert pipeline.text_encoder_2.config.dropout_rate == 0.1


def test_tokenizers_load_by_their_ordinary_classes_and_know_their_special_tokens() -> (
    None
):
    clip, t5 = (
        AutoTokenizer.from_pretrained(toy("flux", "dev") / name)
        for name in ("tokenizer", "tokenizer_2")
    )
    assert (type(clip).__name__, type(t5).__name__) == ("CLIPTokenizer", "T5Tokenizer")
    text = "the dog and é 红 🙂"
    ids = clip(text).input_ids
    assert (ids[0], ids[-1]) == (clip.bos_token_id, clip.eos_token_id)
    # CLIP finds a text's end as its greatest id.
    assert clip.eos_token_id == len(clip) - 1
    decoded = clip.decode(ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.replace(" ", "")
    ids = t5("A dog, 3").input_ids
    assert ids[-1] == t5.eos_token_id == 1
    assert t5.decode(ids, skip_special_tokens=True) == "A dog, 3"
    assert t5.pad_token_id == 0
