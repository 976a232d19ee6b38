"""Captions are what transformers' own classes generate with the same weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dstrain import StateError, UsageError
from dstrain.models import StoredLinear
from dstrain_tools.captioning.captioner import PROMPT, load_captioner
from dstrain_tools.captioning.model_files import find_model
from dstrain_tools.captioning.options import CaptionOptions
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.noise_images import noise_image

Toy = Callable[[str], Path]
TOKENS = 12
QUESTION = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "{images}{prompt}<|im_end|>\n<|im_start|>assistant\n"
)
IMAGE = "<|vision_start|>{pads}<|vision_end|>"


@pytest.fixture
def images() -> list[Image.Image]:
    """Two images of different sizes."""
    return [noise_image(84, 56), noise_image(56, 112)]


def captioner(folder: Path, **options: Any) -> Any:
    given = {"max_new_tokens": TOKENS, "device": "cpu", **options}
    return load_captioner(
        find_model(str(folder), None), CaptionOptions(folder=Path(), **given)
    )


def generated(model: Any, inputs: Any, tokenizer: Any, **settings: Any) -> str:
    """Return what transformers itself writes after the question."""
    tokens = model.eval().generate(
        **inputs, max_new_tokens=TOKENS, do_sample=False, **settings
    )
    answer = tokens[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


def qwen_caption(folder: Path, images: list[Image.Image], prompt: str) -> str:
    """Ask a Qwen2.5-VL that reads the files itself, without its processor."""
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    processor = transformers.Qwen2VLImageProcessorPil()
    patches = processor(images=images, return_tensors="pt")
    marks = [
        IMAGE.format(pads="<|image_pad|>" * (int(grid.prod()) // 4))
        for grid in patches["image_grid_thw"]
    ]
    text = QUESTION.format(images="".join(marks), prompt=prompt)
    ids = tokenizer([text], return_tensors="pt").input_ids
    is_image = ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    inputs = {**patches, "input_ids": ids, "mm_token_type_ids": is_image.int()}
    kind = transformers.Qwen2_5_VLForConditionalGeneration
    model = kind.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    ends.append(model.config.text_config.eos_token_id)
    return generated(model, inputs, tokenizer, eos_token_id=ends, pad_token_id=0)


def test_a_text_encoder_captions_as_transformers_qwen_does(
    toy: Toy, images: list[Image.Image]
) -> None:
    written = captioner(toy("qwen")).write([[image] for image in images[:1]], ["a"])
    assert written == [qwen_caption(toy("qwen"), images[:1], PROMPT)]
    assert written[0].strip()
    asked = captioner(toy("qwen"), prompt="What is it?").write([images[1:]], ["a"])
    assert asked == [qwen_caption(toy("qwen"), images[1:], "What is it?")]
    assert asked != written


@pytest.mark.parametrize("kind", ("qwen", "llava", "blip"))
def test_a_batch_has_the_captions_of_its_images(
    toy: Toy, images: list[Image.Image], kind: str
) -> None:
    model = captioner(toy(kind))
    alone = [model.write([[image]], ["a"])[0] for image in images]
    assert model.write([[image] for image in images], ["a", "b"]) == alone


def test_a_model_with_a_chat_template_is_asked_in_it(
    toy: Toy, images: list[Image.Image]
) -> None:
    folder = toy("llava")
    processor = transformers.LlavaProcessor.from_pretrained(folder)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    question = "<image>What is it?"
    inputs = processor(text=question, images=images[0], return_tensors="pt")
    expected = generated(model, inputs, processor.tokenizer)
    written = captioner(folder, prompt="What is it?").write([images[:1]], ["a"])
    assert written == [expected]
    assert expected.strip()


def test_a_model_without_a_chat_format_captions_unasked(
    toy: Toy, images: list[Image.Image]
) -> None:
    folder = toy("blip")
    processor = transformers.BlipProcessor.from_pretrained(folder)
    model = transformers.BlipForConditionalGeneration.from_pretrained(folder).eval()

    def expected(image: Image.Image, **text: str) -> list[str]:
        inputs = processor(images=image, return_tensors="pt", **text)
        tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        decoded: list[str] = processor.tokenizer.batch_decode(
            tokens, skip_special_tokens=True
        )
        return decoded

    assert captioner(folder).write([images[:1]], ["a"]) == expected(images[0])
    begun = captioner(folder, prompt="a photo of").write([images[:1]], ["a"])
    assert begun == expected(images[0], text="a photo of")
    assert begun[0].startswith("a photo of ")
    # Of a video, it is shown the frame in the middle.
    assert captioner(folder).write([images], ["a"]) == expected(images[1])


def test_tokens_are_drawn_only_where_that_is_asked_for(
    toy: Toy, images: list[Image.Image], tmp_path: Path
) -> None:
    folder = tmp_path / "llava"
    shutil.copytree(toy("llava"), folder)
    settings = {"do_sample": True, "temperature": 3.0, "top_k": 50}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    greedy = captioner(folder)
    assert len({greedy.write([images[:1]], [name])[0] for name in "abc"}) == 1
    drawn = captioner(folder, temperature=2.0)
    texts = [drawn.write([images[:1]], [name])[0] for name in "abc"]
    assert len(set(texts)) == 3
    # Of an image and a seed they are the same again, whatever was captioned before.
    assert drawn.write([images[:1]], ["a"]) == texts[:1]
    other = captioner(folder, temperature=2.0, seed=1)
    assert other.write([images[:1]], ["a"]) != texts[:1]


def test_the_language_model_is_quantized_and_what_reads_images_is_not(
    toy: Toy, images: list[Image.Image]
) -> None:
    quantized = captioner(toy("qwen"), quantize="int8_block")
    kinds = {
        name: type(layer)
        for name, layer in quantized.model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    stored = {name for name, kind in kinds.items() if issubclass(kind, StoredLinear)}
    assert len(stored) == 2 * 7
    assert all("language_model" in name for name in stored)
    plain = captioner(toy("qwen"))
    with torch.inference_mode():
        exact, near = (
            one.model(**one.inputs([images[:1]])).logits for one in (plain, quantized)
        )
    assert not torch.equal(exact, near)
    assert torch.nn.functional.cosine_similarity(exact, near, dim=-1).min() > 0.99


def without_a_weight(folder: Path) -> None:
    path = folder / "text_encoder/model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path)


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def of_type(model_type: str, **entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        # Code beside a model is not run, whatever its configuration says.
        auto = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
        content = {"model_type": model_type, "auto_map": auto, **entries}
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "code.py").write_text("raise SystemExit('was run')")

    return change


def without_a_processor(folder: Path) -> None:
    (folder / "processor_config.json").unlink()


def without_words(folder: Path) -> None:
    (folder / "tokenizer/tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("kind", "change", "error", "named"),
    [
        ("qwen", without_a_weight, StateError, ": lm_head.weight"),
        ("qwen", without_words, StateError, "error: tokenizer: "),
        ("blip", cut_off, StateError, "error: model.safetensors: "),
        ("blip", without_a_processor, StateError, "model"),
        ("blip", of_type("no_such_type"), UsageError, "'no_such_type'"),
        ("blip", of_type("bert"), UsageError, "'bert'"),
        ("blip", of_type("blip", text_config={"hidden_size": "x"}), StateError, "blip"),
    ],
)
def test_files_that_do_not_fit_are_named(
    kind: str,
    change: Callable[[Path], None],
    error: type[Exception],
    named: str,
    toy: Toy,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(toy(kind), folder)
    change(folder)
    with pytest.raises(error) as caught:
        captioner(folder)
    assert named in str(caught.value).replace(f"{folder}/", "")
