"""Units give what diffusers' pipeline gives, for one sample, from plain values."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from dstrain import UsageError
from dstrain.plugin import Unit
from dstrain_qwen_image import units
from PIL import Image

from tests.support.noise_images import smooth_noise

PROMPT, IMAGE = Unit(units.encode_prompt), Unit(units.encode_image)


@pytest.fixture
def published(loaded: dict[str, Any]) -> QwenImagePipeline:
    parts = {name: loaded[name] for name in ("text_encoder", "tokenizer", "vae")}
    return QwenImagePipeline(**parts, transformer=loaded["dit"], scheduler=None)


@torch.no_grad()
@pytest.mark.parametrize(
    "prompt",
    ["a red apple on a table", "", " ", "\n red", "x" * 900, "红苹果 <|im_end|> {}"],
)
def test_prompt_embeddings_are_bit_equal_to_diffusers(
    prompt: str, loaded: dict[str, Any], published: QwenImagePipeline
) -> None:
    made = PROMPT.run({"prompt": prompt}, loaded)
    wanted, mask = published.encode_prompt([prompt])
    assert torch.equal(made["prompt_emb"], wanted)
    assert mask is None
    assert made["prompt_mask"].shape == wanted.shape[:2]
    assert made["prompt_mask"].dtype == torch.bool
    assert made["prompt_mask"].all()


@torch.no_grad()
def test_a_long_prompt_keeps_4096_tokens_after_the_prefix(
    loaded: dict[str, Any],
) -> None:
    assert PROMPT.run({"prompt": "z" * 4500}, loaded)["prompt_emb"].shape == (
        1,
        4096,
        32,
    )


def test_a_tokenizer_of_another_model_is_refused_by_name(
    loaded: dict[str, Any],
) -> None:
    class Bytes:
        name_or_path = "some/folder"

        def __call__(self, text: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=list(text.encode()))

    with pytest.raises(
        UsageError, match=r"tokenizer some/folder: .* into \d+ tokens, expected 34"
    ):
        PROMPT.run({"prompt": "x"}, {**loaded, "tokenizer": Bytes()})


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(64, 96), (32, 32)])
def test_an_image_is_encoded_as_the_normalized_mode(
    height: int, width: int, loaded: dict[str, Any]
) -> None:
    vae = loaded["vae"]
    pixels = VaeImageProcessor().preprocess(smooth_noise(width, height))
    mode = vae.encode(pixels[:, :, None]).latent_dist.mode()
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    made = IMAGE.run({"input_image": smooth_noise(width, height)}, loaded)[
        "input_latents"
    ]
    assert made.shape == (1, 16, 1, height // 8, width // 8)
    assert torch.equal(made, (mode - mean) / std)


@torch.no_grad()
def test_decoding_undoes_the_normalization_as_diffusers_does(
    loaded: dict[str, Any],
) -> None:
    vae = loaded["vae"]
    latents = torch.randn(1, 16, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    pixels = vae.decode(latents / (1 / std) + mean, return_dict=False)[0][:, :, 0]
    wanted = VaeImageProcessor().postprocess(pixels, "pil")[0]
    made = units.decode(latents, vae=loaded["vae"])["image"]
    assert made.size == (96, 64)
    assert np.array_equal(np.asarray(made), np.asarray(wanted))


@torch.no_grad()
def test_in_bf16_embeddings_are_bf16_and_latents_fp32(
    loaded_bf16: dict[str, Any],
) -> None:
    loaded = loaded_bf16
    assert PROMPT.run({"prompt": "x"}, loaded)["prompt_emb"].dtype == torch.bfloat16
    latents = IMAGE.run({"input_image": smooth_noise(32, 32)}, loaded)["input_latents"]
    assert latents.dtype == torch.float32
    assert units.decode(latents, vae=loaded["vae"])["image"].size == (32, 32)


@pytest.mark.parametrize(
    ("sides", "pictures", "limit"),
    [
        ((None, None), [], 4096),
        ((1024, 1024), [], 4064),
        ((1328, 752), [], 4096 - 41),
        ((1024, 1024), [(2048, 512)], 4096 - 64),
    ],
)
def test_text_has_the_positions_that_the_images_leave(
    sides: tuple[int | None, int | None],
    pictures: list[tuple[int, int]],
    limit: int,
) -> None:
    images = [Image.new("RGB", size) for size in pictures]
    assert units.max_tokens(*sides, images) == limit
    rope = QwenEmbedRope(theta=10000, axes_dim=[16, 56, 56], scale_rope=True)
    shown = [side or 16 for side in sides]
    grids = [(1, height // 16, width // 16) for height, width in [shown]]
    grids += [(1, height // 16, width // 16) for width, height in pictures]
    _, text = rope([grids], max_txt_seq_len=4096, device=torch.device("cpu"))
    assert len(text) == limit


def test_images_are_where_the_text_encoder_looks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is planned with the toy's tokenizer, whose token of an image has another id."""
    monkeypatch.setattr(units, "check_prefix", lambda *_: None)
    ids, is_image = torch.tensor([[5, 2, 2, 6]]), torch.tensor([[0, 1, 1, 0]])
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tokens["mm_token_type_ids"] = is_image
    given: list[Any] = []

    def model(**inputs: Any) -> Any:
        given.append(inputs["input_ids"])
        return SimpleNamespace(last_hidden_state=torch.zeros(1, 4, 8))

    encoder = SimpleNamespace(model=model, config=SimpleNamespace(image_token_id=9))

    class Processor:
        tokenizer = None

        def __call__(self, *_: Any) -> dict[str, torch.Tensor]:
            return tokens

    cpu = torch.device("cpu")
    units._encode_with_images("a dog", [], 8, encoder, Processor(), cpu)
    assert given[0].tolist() == [[5, 9, 9, 6]]
