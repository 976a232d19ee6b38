"""The tests' own family, `tiny`: every kind of part a family can have, at sizes that
train in milliseconds.

Images have sides that are multiples of 8; latents are (batch, 4, height / 8, width /
8).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np
import torch
from dstrain.plugin import (
    Column,
    Component,
    DiffusersNetwork,
    Files,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    ModelFamily,
    Option,
    PipelineSpec,
)
from dstrain.plugin.functional import tensor_to_image
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

CHANNELS, WORDS = 4, 64
SIZES = MappingProxyType(
    {
        "dit": {"width": 8, "depth": 2},
        "text_encoder": {"width": 8},
        "vae": {"branch": 8},
    }
)
FOLDERS = MappingProxyType(
    {"dit": "transformer", "text_encoder": "text_encoder", "vae": "vae"}
)
IDS = ",".join(f"Tiny/Tiny:{folder}/model*.safetensors" for folder in FOLDERS.values())
"""The components by model id."""


class Block(nn.Module):
    """One block of the denoiser; `text` is what no loss reaches in the last one."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)
        self.text = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tokens: Tensor, text: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add to each token what it finds in the text."""
        scores = (self.to_q(tokens) @ text.transpose(1, 2)).masked_fill(
            ~mask[:, None], -1e9
        )
        tokens = tokens + self.dropout(
            self.to_out(torch.tanh(scores.softmax(-1) @ text + tokens))
        )
        return tokens, text + self.text(text)


class Dit(nn.Module):
    """The denoiser; checkpoints its blocks as those of diffusers do."""

    def __init__(self, width: int, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.proj_in = nn.Linear(CHANNELS, width)
        self.time = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.proj_out = nn.Linear(width, CHANNELS)
        self.checkpoint: Any = None

    def enable_gradient_checkpointing(self, function: Any) -> None:
        self.checkpoint = function

    def forward(
        self, noisy_latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor
    ) -> Tensor:
        """(batch, 4, h, w) -> the same shape."""
        angle = timestep[:, None] / 1000 * 3
        time = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        tokens = self.proj_in(noisy_latents.flatten(2).transpose(1, 2)) + time[:, None]
        for block in self.blocks:
            call = partial(self.checkpoint, block) if self.checkpoint else block
            tokens, text = call(tokens, text, mask)
        return self.proj_out(tokens).transpose(1, 2).reshape(noisy_latents.shape)


class TextEncoder(nn.Module):
    """One vector per letter; it has dropout, so that one left in training mode is
    noticed.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """(1, letters) -> (1, letters, width)."""
        hidden: Tensor = self.layer(self.dropout(self.embed(ids)))
        return hidden


class Vae(nn.Module):
    """A patch of pixels to 4 numbers, and back."""

    def __init__(self, branch: int) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, CHANNELS, branch, branch)
        self.decoder = nn.ConvTranspose2d(CHANNELS, 3, branch, branch)


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offset = json.loads((folder / "vocabulary.json").read_text())["offset"]

    def __call__(self, text: str) -> Tensor:
        """Text -> (1, letters + 1)."""
        return torch.tensor(
            [[0, *((ord(letter) + self.offset) % WORDS for letter in text)]]
        )


class Prompt(TypedDict):
    """A text as the denoiser reads it."""

    prompt_emb: Tensor
    prompt_mask: Tensor


class Latents(TypedDict):
    input_latents: Tensor


class DecodedImage(TypedDict):
    image: Image.Image


def encode_prompt(prompt: str, *, text_encoder: Any, tokenizer: Any) -> Prompt:
    """Text -> one vector per letter."""
    ids = tokenizer(prompt)
    return {
        "prompt_emb": text_encoder(ids),
        "prompt_mask": torch.ones_like(ids, dtype=torch.bool),
    }


def encode_image(input_image: Image.Image, *, vae: Any, dtype: torch.dtype) -> Latents:
    """RGB image -> fp32 latents."""
    pixels = torch.from_numpy(np.array(input_image)).permute(2, 0, 1)[None] / 127.5 - 1
    return {"input_latents": vae.encoder(pixels.to(dtype)).float()}


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    *,
    dit: Any,
) -> Tensor:
    prediction: Tensor = dit(noisy_latents, timestep, prompt_emb, prompt_mask)
    return prediction


def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """(1, 4, height / 8, width / 8)."""
    return (1, CHANNELS, height // 8, width // 8)


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    return negative + scale * (positive - negative)


def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Latents -> RGB image."""
    pixels = vae.decoder(latents.to(vae.decoder.weight.dtype))
    return {"image": tensor_to_image(pixels)}


def latent_shape_of_mood(height: int, width: int, mood: str = "") -> tuple[int, ...]:
    """The same for every mood."""
    return latent_shape(height, width)


BASE = PipelineSpec(
    components=("dit", "text_encoder", "vae", "tokenizer"),
    units=(encode_prompt, encode_image),
    model_fn=predict,
    decoders=(decode,),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=8),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
    },
    schedule=FlowMatchSchedule(shift=3.0, latents_per_token=1),
    denoiser_config={"depth": 2},
    latent_shape=latent_shape,
    apply_guidance=apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
    padded={"prompt_emb": 1, "prompt_mask": 1},
    unused_parameters={"dit": ("blocks.{last}.text.*",), "text_encoder": ("head.*",)},
    defaults={
        "height": 16,
        "width": 16,
        "num_inference_steps": 4,
        "negative_prompt": "",
    },
)
PIPELINES = {
    "base": BASE,
    # A column more, which training does not read.
    "other": replace(
        BASE,
        denoiser_config={"depth": 1},
        inputs={**BASE.inputs, "mood": Column("mood")},
        latent_shape=latent_shape_of_mood,
    ),
}


def build(variant: str) -> PipelineSpec:
    return MODEL.spec(variant)


def write(
    folder: Path, variant: str = "base", seed: int = 0, dropout: float = 0.0
) -> None:
    """Write a model in a layout like the published ones; the denoiser in two shards."""
    for name, sizes in SIZES.items():
        place = folder / FOLDERS[name]
        place.mkdir(parents=True)
        entries = {**sizes, "dropout": dropout} if name == "dit" else dict(sizes)
        if name == "dit":
            entries["depth"] = build(variant).denoiser_config["depth"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weights = NETWORKS[name](**entries).state_dict()
        (place / "config.json").write_text(json.dumps(entries))
        parts = (
            [list(weights)[::2], list(weights)[1::2]]
            if name == "dit"
            else [list(weights)]
        )
        for i, names in enumerate(parts, 1):
            save_file(
                {key: weights[key] for key in names},
                place / f"model-{i}-of-{len(parts)}.safetensors",
            )
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/vocabulary.json").write_text(json.dumps({"offset": 1}))


def weights_of(folder: Path) -> dict[str, list[str]]:
    """Component -> its files in a folder that `write` wrote."""
    return {
        name: sorted(map(str, (folder / place).glob("*.safetensors")))
        for name, place in FOLDERS.items()
    }


def write_data(
    folder: Path,
    captions: tuple[str, ...],
    sizes: tuple[tuple[int, int], ...] = ((16, 16),),
) -> None:
    """Write a dataset: an image of noise for each caption; sizes (height, width) go
    round.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    rows = []
    for i, caption in enumerate(captions):
        height, width = sizes[i % len(sizes)]
        Image.fromarray(numbers.integers(0, 256, (height, width, 3), np.uint8)).save(
            folder / f"{i}.png"
        )
        rows.append({"image": f"{i}.png", "prompt": caption})
    (folder / "metadata.json").write_text(json.dumps(rows))


class TokenizerFolder:
    def load(self, files: Files, configuration: Any, dtype: torch.dtype) -> Tokenizer:
        return Tokenizer(files.folder)


NETWORKS: Mapping[str, Any] = MappingProxyType(
    {"dit": Dit, "text_encoder": TextEncoder, "vae": Vae}
)
PUBLISHED = MappingProxyType({"Tiny/Tiny": MappingProxyType({"width": 8, "depth": 2})})
MARKS = MappingProxyType(
    {
        "dit": ("proj_in.weight", "blocks.*.text.weight"),
        "text_encoder": ("embed.weight",),
        "vae": ("encoder.weight", "decoder.weight"),
    }
)


def _component(name: str) -> Component:
    return Component(
        name,
        network=DiffusersNetwork(f"{__name__}:{NETWORKS[name].__name__}"),
        folder=FOLDERS[name],
        key_patterns=MARKS[name],
        default_configs=PUBLISHED if name == "dit" else {},
    )


COMPONENTS = (
    *map(_component, NETWORKS),
    Component("tokenizer", TokenizerFolder(), "tokenizer"),
)

MODEL = ModelFamily(
    api=2,
    name="tiny",
    pipelines=f"{__name__}:PIPELINES",
    components=f"{__name__}:COMPONENTS",
    toy=f"{__name__}:write",
    variants=("base", "other"),
    model_ids=MappingProxyType({"other": ("Tiny/Other*",)}),
    model_files=MappingProxyType(
        {
            "Tiny/Tiny": MappingProxyType(
                {name: f"{place}/model*.safetensors" for name, place in FOLDERS.items()}
            )
        }
    ),
    pipeline_classes=("TinyPipeline",),
    default_trainable="dit",
    lora_targets=MappingProxyType(
        {"dit": ("to_q", "to_out"), "text_encoder": ("layer",)}
    ),
    lora_prefixes=MappingProxyType(
        {"dit": "transformer", "text_encoder": "text_encoder"}
    ),
    default_ids=MappingProxyType({"tokenizer": "Tiny/Tiny:tokenizer/"}),
    options=(Option("tokenizer_path", "Folder of the tokenizer.", "tokenizer"),),
)
