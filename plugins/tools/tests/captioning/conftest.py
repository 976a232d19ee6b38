"""Image-to-text models of toy sizes with random weights, as they are published, each
written once; and a folder of images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from dstrain_tools.captioning import captioner
from PIL import Image

from tests.support.noise_images import noise_image
from tests.support.once import once
from tests.support.toys import toy as family_toy

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
CHAT = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def write_llava(folder: Path) -> None:
    """Write a LLaVA with a chat template, in files beside each other."""
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(
        family_toy("qwen_image", "base") / "tokenizer",
        extra_special_tokens={"image_token": "<image>"},
    )
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    processor = transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=CHAT,
        num_additional_image_tokens=1,
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **SIZES, image_size=28, patch_size=14
        ),
        text_config=transformers.LlamaConfig(
            **SIZES, vocab_size=len(tokenizer), initializer_range=0.2
        ),
        image_token_index=image_id,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def write_blip(folder: Path) -> None:
    """Write a BLIP, which has no chat format."""
    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[DEC]"]
    words += ["a", "photo", "of", "the", "cat", "dog", "red"]
    words += [f"word{number}" for number in range(20)]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"), bos_token="[DEC]")
    images = transformers.BlipImageProcessorPil(size={"height": 28, "width": 28})
    text = transformers.BlipTextConfig(
        **SIZES,
        vocab_size=len(words),
        bos_token_id=4,
        sep_token_id=3,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=0.2,
        encoder_hidden_size=32,
    )
    vision = transformers.BlipVisionConfig(**SIZES, image_size=28, patch_size=14)
    config = transformers.BlipConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32
    )
    torch.manual_seed(0)
    transformers.BlipForConditionalGeneration(config).save_pretrained(folder)
    transformers.BlipProcessor(images, tokenizer).save_pretrained(folder)


@pytest.fixture(scope="session")
def toy() -> Callable[[str], Path]:
    """Return toy(kind): the folder of a model of this kind, to be read or copied. Of "qwen"
    it is Qwen-Image's pipeline, the text encoder of which is a Qwen2.5-VL.
    """

    def written(kind: str) -> Path:
        if kind == "qwen":
            return family_toy("qwen_image", "base")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return once(f"image-to-text-{kind}", WRITERS[kind])

    return written


WRITERS = MappingProxyType({"llava": write_llava, "blip": write_blip})


@pytest.fixture
def photos(empty: Path) -> Path:
    """A folder with three images of different sizes, one of them in a folder below it, in
    the working directory.
    """
    folder = Path("photos")
    (folder / "beach").mkdir(parents=True)
    for number, name in enumerate(("beach/sea.webp", "cat.png", "dog.jpg")):
        image = noise_image(96 - 20 * number, 64, number)
        image.paste((255 - 100 * number, 40 * number, 90), (0, 0, 40, 40))
        image.save(folder / name)
    return folder


@dataclass
class Writer:
    """Stands for a model: writes what `texts` says of an image."""

    texts: dict[str, str]
    batches: list[list[str]] = field(default_factory=list)
    shown: dict[str, list[Image.Image]] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None
    """Called at each batch."""

    def write(
        self, shown: Sequence[Sequence[Image.Image]], names: Sequence[str]
    ) -> list[str]:
        self.before()
        self.batches.append(list(names))
        self.shown.update(zip(names, map(list, shown), strict=True))
        return [self.texts.get(name, "a text") for name in names]


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch, photos: Path) -> Writer:
    """The model of every command."""
    texts = {"beach/sea.webp": "the sea", "cat.png": "a cat", "dog.jpg": "a  dog\n"}
    made = Writer(texts)
    monkeypatch.setattr(captioner, "load_captioner", lambda *_: made)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    return made
