"""A family, `stored`, whose cached values are of every kind.

Units note each run in the file LOG, so that tests can count them, also in processes
that were killed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypedDict

import numpy as np
import torch
from dstrain import Task, flow_match
from dstrain.models.components import Network
from dstrain.plugin import (
    Column,
    Component,
    Files,
    FlowMatchSchedule,
    Measured,
    ModelFamily,
    PipelineSpec,
    versioned,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LOG = Path("/dev/null")
GUIDED = Task.of("guided", flow_match, ("positive", "negative"))


class Facts(TypedDict):
    """A record with one field of each plain kind."""

    words: int
    ratio: float
    short: bool
    nothing: None
    first: Tensor


class Prompt(TypedDict):
    """A text as encoded, in the compute dtype."""

    prompt_emb: Tensor


class Description(TypedDict):
    """Values that are no plain tensors."""

    facts: Facts
    layers: list[Tensor]
    title: str


class Latents(TypedDict):
    """An image in latent space, fp32, and a small bf16 one."""

    input_latents: Tensor
    thumbnail: Tensor


class Idle(TypedDict):
    """What nobody reads."""

    unread: Tensor


def ran(unit: str) -> None:
    with LOG.open("a") as log:
        log.write(f"{unit}\n")


def runs() -> Counter[str]:
    """How often each unit ran since LOG was last empty, and empty it."""
    lines = LOG.read_text().splitlines()
    LOG.write_text("")
    return Counter(lines)


def encode_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, dtype: torch.dtype
) -> Prompt:
    """Text -> (1, letters, 8)."""
    ran("encode_prompt")
    ids = torch.tensor([[0, *((ord(letter) + tokenizer) % 64 for letter in prompt)]])
    return {"prompt_emb": text_encoder(ids).to(dtype)}


def describe(prompt: str, *, dit_config: Any) -> Description:
    """Text -> a record, a list and a text, which need no weights."""
    ran("describe")
    words = prompt.split()
    first = torch.tensor([len(word) for word in words], dtype=torch.int64)
    facts: Facts = {
        "words": len(words),
        "ratio": len(prompt) / 3,
        "short": not words,
        "nothing": None,
        "first": first,
    }
    layers = [
        torch.full((1, 2), float(len(prompt))) * i for i in range(dit_config["depth"])
    ]
    return {"facts": facts, "layers": layers, "title": prompt.title()}


def encode_image(input_image: Image.Image, *, vae: Any, dtype: torch.dtype) -> Latents:
    """RGB image -> (1, 4, height, width), a view of ten times as much."""
    ran("encode_image")
    pixels = torch.from_numpy(np.array(input_image)).permute(2, 0, 1)[None] / 127.5 - 1
    latents = vae(pixels.to(dtype)).float().repeat(10, 1, 1, 1)
    return {
        "input_latents": latents[3:4],
        "thumbnail": latents[:1, :, ::8, ::8].bfloat16(),
    }


def idle(prompt: str) -> Idle:
    ran("idle")
    return {"unread": torch.zeros(1)}


UNITS = (encode_prompt, describe, encode_image, idle)
VERSIONS: Mapping[str, int] = MappingProxyType({})


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    facts: Facts,
    layers: list[Tensor],
    title: str,
    thumbnail: Tensor,
    height: int,
    label: str = "",
    reference: Image.Image | None = None,
    references: list[Image.Image] | None = None,
    *,
    dit: Any,
) -> Tensor:
    prediction: Tensor = dit(noisy_latents)
    return prediction


class Pipelines(Mapping[str, PipelineSpec]):
    """The specs of both variants, of units and versions as they are when asked."""

    def __getitem__(self, variant: str) -> PipelineSpec:
        return PipelineSpec(
            components=("dit", "text_encoder", "vae", "tokenizer"),
            units=[versioned(VERSIONS.get(unit.__name__, 0))(unit) for unit in UNITS],
            model_fn=predict,
            decoders=(),
            inputs={
                "prompt": Column("prompt"),
                "negative_prompt": Column("negative_prompt"),
                "label": Column("label"),
                "input_image": Column("image", "image", multiple=8),
                "reference": Column("reference", "image", mode="RGBA", multiple=8),
                "references": Column("references", "images", multiple=8),
                "height": Measured("input_image", "height"),
            },
            schedule=FlowMatchSchedule(shift=3.0),
            latent_shape=latent_shape,
            apply_guidance=lambda positive, negative, scale: positive,
            cfg_inputs={"prompt": "negative_prompt"},
        )

    def __iter__(self) -> Iterator[str]:
        return iter(("base", "other"))

    def __len__(self) -> int:
        return 2


PIPELINES = Pipelines()


def build(variant: str) -> PipelineSpec:
    return MODEL.spec(variant)


def latent_shape(height: int) -> tuple[int, ...]:
    return (1, 4, height, height)


def _module(make: Callable[[], nn.Module]) -> Network:
    def load(files: Files, configuration: Any, dtype: torch.dtype) -> nn.Module:
        module = make()
        module.load_state_dict(load_file(files.paths[0]))
        return module.to(dtype)

    return SimpleNamespace(load=load)


def load_tokenizer(files: Files, configuration: Any, dtype: torch.dtype) -> int:
    """The tokenizer is a number."""
    return int((files.folder / "offset.txt").read_text())


PUBLISHED = MappingProxyType(
    {"Stored/Stored": MappingProxyType({"depth": 3, "axes": (1, 2)})}
)
COMPONENTS = (
    Component(
        "dit",
        _module(lambda: nn.Conv2d(4, 4, 1)),
        "dit",
        ("dit.*",),
        default_configs=PUBLISHED,
    ),
    Component(
        "text_encoder",
        _module(lambda: nn.Sequential(nn.Embedding(64, 8))),
        "text_encoder",
        ("0.weight",),
    ),
    Component("vae", _module(lambda: nn.Conv2d(3, 4, 1)), "vae", ("weight", "bias")),
    Component("tokenizer", SimpleNamespace(load=load_tokenizer), "tokenizer"),
)

MODEL = ModelFamily(
    api=2,
    name="stored",
    pipelines=f"{__name__}:PIPELINES",
    components=f"{__name__}:COMPONENTS",
    toy=f"{__name__}:write_model",
    variants=("base", "other"),
    default_trainable="dit",
    lora_targets=MappingProxyType({}),
    lora_prefixes=MappingProxyType({}),
    default_ids=MappingProxyType({}),
)


def write_model(folder: Path) -> None:
    """Write encoders and a tokenizer; of the denoiser, only the configuration."""
    numbers = torch.Generator().manual_seed(0)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "text_encoder": {"0.weight": (64, 8)},
        "vae": {"weight": (4, 3, 1, 1), "bias": (4,)},
    }
    for name, parts in shapes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        tensors = {
            part: torch.randn(shape, generator=numbers) for part, shape in parts.items()
        }
        save_file(tensors, folder / name / "model.safetensors")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/offset.txt").write_text("1")
