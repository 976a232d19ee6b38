"""EliGen: each entity's prompt belongs to its part of the image."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import InputError
from dstrain.cli.main import main
from dstrain.plugin import Unit
from dstrain_qwen_image import entities
from dstrain_qwen_image.masked_attention import MaskedAttention, use_masked_attention
from dstrain_qwen_image.model_fn import predict
from dstrain_qwen_image.toy import write
from PIL import Image
from torch import Tensor

TOKENS = Unit(entities.find_entity_tokens)


def mask_of(box: tuple[int, int, int, int]) -> Image.Image:
    """A mask, 64 pixels wide and 32 high, that is white in a box."""
    mask = Image.new("L", (64, 32))
    mask.paste(255, box)
    return mask


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def given(texts: tuple[int, ...] = (3, 5), padded: int = 0) -> dict[str, Any]:
    """The arguments of a call with entities of so many tokens, the last ones padding."""
    masks = [torch.ones(1, count, dtype=torch.bool) for count in texts]
    for mask in masks:
        mask[:, mask.shape[1] - padded :] = False
    regions = torch.zeros(1, len(texts), 8, dtype=torch.bool)
    for number in range(len(texts)):
        regions[:, number, number : number + 3] = True
    return {
        "noisy_latents": noise(1, 16, 1, 4, 8),
        "timestep": torch.tensor([500.0]),
        "prompt_emb": noise(1, 4, 32),
        "prompt_mask": torch.ones(1, 4, dtype=torch.bool),
        "entity_emb": [noise(1, count, 32) for count in texts],
        "entity_emb_mask": masks,
        "entity_regions": regions,
    }


def test_a_token_is_of_an_entity_where_a_latent_of_it_is_white() -> None:
    masks = [mask_of((0, 0, 16, 16)), mask_of((23, 12, 64, 32)), mask_of((0, 0, 3, 3))]
    values = {"eligen_entity_masks": masks, "eligen_entity_prompts": ["a", "b", "c"]}
    made = TOKENS.run({**values, "height": 32, "width": 64}, {})["entity_regions"]
    rows = made.view(3, 2, 4).int().tolist()
    assert rows[0] == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert rows[1] == [[0, 1, 1, 1], [0, 1, 1, 1]]
    assert rows[2] == [[0, 0, 0, 0], [0, 0, 0, 0]]
    values["eligen_entity_prompts"] = ["a"]
    with pytest.raises(InputError, match="masks: 3, prompts: 1; each entity"):
        TOKENS.run({**values, "height": 32, "width": 64}, {})


def test_texts_attend_to_themselves_and_their_regions_and_nothing_to_padding() -> None:
    valid = torch.tensor([[True, False, True]])
    regions = torch.tensor([[[True, False]]])
    found = entities.attention_mask([2, 1], valid, regions)[0, 0].int().tolist()
    assert found == [
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0],
        [0, 0, 1, 1, 1],
        [1, 0, 1, 1, 1],
        [0, 0, 1, 1, 1],
    ]


@torch.no_grad()
def test_without_a_mask_the_attention_is_that_of_diffusers(
    loaded: dict[str, Any],
) -> None:
    values = given()
    plain = (values[name] for name in ("noisy_latents", "timestep", "prompt_emb"))
    arguments = (*plain, values["prompt_mask"])
    before = predict(*arguments, dit=loaded["dit"])
    use_masked_attention(loaded["dit"])
    assert isinstance(
        loaded["dit"].transformer_blocks[0].attn.processor, MaskedAttention
    )
    assert torch.equal(predict(*arguments, dit=loaded["dit"]), before)
    # The negative branch has no entities.
    negative = entities.predict_entities(**values, dit=loaded["dit"], branch="negative")
    assert torch.equal(negative, before)


@torch.no_grad()
def test_padding_of_an_entity_changes_nothing(loaded: dict[str, Any]) -> None:
    short, long = given((3, 5)), given((3, 5))
    for name in ("entity_emb", "entity_emb_mask"):
        kept = [short[name][0], short[name][1][:, :2]]
        short[name] = kept
    long["entity_emb_mask"][1][:, 2:] = False
    one, other = (
        entities.predict_entities(**values, dit=loaded["dit"], branch="positive")
        for values in (short, long)
    )
    assert torch.allclose(one, other, atol=1e-5)


def test_checkpointing_changes_no_gradient(
    components_of: Callable[[str], dict[str, Any]],
) -> None:
    gradients = []
    for checkpointed in (False, True):
        dit = components_of("eligen")["dit"].requires_grad_(True)
        if checkpointed:
            dit.enable_gradient_checkpointing()
        made = entities.predict_entities(**given(), dit=dit, branch="positive")
        made.square().sum().backward()
        gradients.append(dit.transformer_blocks[0].attn.add_k_proj.weight.grad)
    assert gradients[0].any()
    assert torch.equal(*gradients)


def test_the_published_command_trains_from_a_lora_and_generates_with_entities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("models/Qwen/Qwen-Image"))
    Path("data").mkdir()
    Image.new("RGB", (64, 32), "navy").save("data/image.png")
    for name, box in (("a", (0, 0, 32, 32)), ("b", (32, 0, 64, 32))):
        mask_of(box).save(f"data/{name}.png")
    row = {
        "image": "image.png",
        "prompt": "a dog beside a cat",
        "eligen_entity_prompts": ["a dog", "a cat"],
        "eligen_entity_masks": ["a.png", "b.png"],
    }
    Path("data/metadata.json").write_text(json.dumps([row]))
    words = ["--model_id", "Qwen/Qwen-Image", "--dataset_base_path", "data"]
    words += ["--data_file_keys", "image,eligen_entity_masks", "--lora_rank", "4"]
    words += ["--extra_inputs", "eligen_entity_masks,eligen_entity_prompts"]
    words += ["--max_steps", "1", "--remove_prefix_in_ckpt", "pipe.dit."]
    assert main([*words, "--output_path", "first"]) == 0
    (first,) = Path("first").glob("*.safetensors")
    more = ["--lora_checkpoint", str(first), "--output_path", "second"]
    assert main([*words, *more]) == 0
    words = ["generate", "--run", "second", "--prompt", "a dog beside a cat"]
    words += ["--height", "32", "--width", "64", "--num_inference_steps", "1"]
    for name, text in (("a", "a dog"), ("b", "a cat")):
        words += ["--input", f"eligen_entity_prompts={text}"]
        words += ["--input", f"eligen_entity_masks=data/{name}.png"]
    assert main([*words, "--output", "both.png"]) == 0
    with Image.open("both.png") as made:
        assert made.size == (64, 32)
