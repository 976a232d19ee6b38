"""LoRA files as other programs write them, with what they change.

Names and endings from: toolkit/ of ostris/ai-toolkit; modules/util/convert/lora and
modules/modelSaver of Nerogar/OneTrainer; networks/ of kohya-ss/sd-scripts and
kohya-ss/musubi-tuner; lycoris/ of KohakuBlueleaf/LyCORIS, which SimpleTuner uses;
src/flux/modules/layers.py of XLabs-AI/x-flux; tools/extract of ModelTC/LightX2V; models/base.py of
tdrussell/diffusion-pipe. Nothing
here uses dstrain's own key tables.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from peft import LoraConfig
from torch import Tensor

from tests.support.other_loaders import Part, add, part_of

Tensors = Mapping[str, Tensor]
RANK, ALPHA = 4, 3.0
DOWN_UP = ("lora_down.weight", "lora_up.weight")
A_B = ("lora_A.weight", "lora_B.weight")


@dataclass
class ForeignFile:
    """A file, and the truth about it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Tensor] = field(default_factory=dict)
    """Parameter, as diffusers names it -> what is added to it, in fp64."""
    name: str = "theirs.safetensors"
    beside: dict[str, str] = field(default_factory=dict)
    """Name of a file beside it -> its content."""
    options: str = ""
    """What stands after its name where dstrain reads it."""


@dataclass(frozen=True)
class FileLayer:
    """A layer as a file names it."""

    name: str
    shape: tuple[int, int]
    parts: Mapping[str, Part]
    """The layers of diffusers' network that it stands for."""


def layers_of(family: str, weights: Tensors, original: bool) -> Iterator[FileLayer]:
    """Yield the linear layers in blocks, by the names of diffusers or the original's."""
    named: dict[str, dict[str, Part]] = defaultdict(dict)
    for key, weight in weights.items():
        layer = key.removesuffix(".weight")
        is_in_block = re.search(r"(blocks|layers|refiner)\.\d", layer)
        if layer == key or weight.ndim != 2 or not is_in_block:
            continue
        part = part_of("comfyui", family, layer) if original else Part(layer)
        if part is not None:
            named[part.layer][layer] = part
    for name, parts in named.items():
        layer, part = next(iter(parts.items()))
        height, width = weights[f"{layer}.weight"].shape
        yield FileLayer(
            name, (height * part.parts // (part.stop - part.start), width), parts
        )


class Draw:
    """Random numbers from seed 0."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        """Return fp32 numbers of a spread that shows."""
        return 0.3 * torch.randn(shape, generator=self._generator)


def pair(
    file: ForeignFile,
    draw: Draw,
    layer: FileLayer,
    key: str,
    ends: tuple[str, str],
    alpha: float | None,
) -> None:
    """Add LoRA on one layer; without alpha the scale is 1."""
    down, up = draw(RANK, layer.shape[1]), draw(layer.shape[0], RANK)
    file.tensors |= {f"{key}.{ends[0]}": down, f"{key}.{ends[1]}": up}
    if alpha is not None:
        file.tensors[f"{key}.alpha"] = torch.tensor(alpha)
    scale = 1.0 if alpha is None else alpha / RANK
    add(file.changes, scale * up.double() @ down.double(), layer.parts)


def loha(file: ForeignFile, draw: Draw, layer: FileLayer, key: str) -> None:
    """Add LyCORIS' LoHa on one layer."""
    products = []
    for number in (1, 2):
        a, b = draw(layer.shape[0], RANK), draw(RANK, layer.shape[1])
        file.tensors |= {f"{key}.hada_w{number}_a": a, f"{key}.hada_w{number}_b": b}
        products.append(a.double() @ b.double())
    file.tensors[f"{key}.alpha"] = torch.tensor(ALPHA)
    add(file.changes, ALPHA / RANK * products[0] * products[1], layer.parts)


def lokr(file: ForeignFile, draw: Draw, layer: FileLayer, key: str) -> None:
    """Add LyCORIS' LoKr on one layer, the second matrix of rank `RANK`."""
    first = draw(2, 2)
    a, b = draw(layer.shape[0] // 2, RANK), draw(RANK, layer.shape[1] // 2)
    file.tensors |= {f"{key}.lokr_w1": first, f"{key}.lokr_w2_a": a}
    file.tensors |= {f"{key}.lokr_w2_b": b, f"{key}.alpha": torch.tensor(ALPHA)}
    product = torch.kron(first.double(), a.double() @ b.double())
    add(file.changes, ALPHA / RANK * product, layer.parts)


def ai_toolkit(family: str, weights: Tensors) -> ForeignFile:
    """No alpha; the header says who wrote it. Of FLUX.2 and Wan it has the original names."""
    software = json.dumps({"name": "ai-toolkit", "repo": "", "version": "0.5.0"})
    file, draw = ForeignFile(header={"software": software, "format": "pt"}), Draw()
    prefix = "transformer." if family == "flux" else "diffusion_model."
    for layer in layers_of(family, weights, original=family in ("flux2", "wan")):
        pair(file, draw, layer, prefix + layer.name, A_B, None)
    return file


def diffusers(family: str, weights: Tensors) -> ForeignFile:
    """As `save_lora_weights` of a pipeline writes it, SimpleTuner's LoRA too."""
    file, draw = ForeignFile(), Draw()
    prefix = "unet" if family == "sdxl" else "transformer"
    for layer in layers_of(family, weights, original=False):
        pair(file, draw, layer, f"{prefix}.{layer.name}", A_B, None)
    file.changes = {name: ALPHA / RANK * one for name, one in file.changes.items()}
    targets = sorted(name.removesuffix(".weight") for name in file.changes)
    adapter = {"r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    fields = {f"{prefix}.{name}": value for name, value in adapter.items()}
    file.header = {"lora_adapter_metadata": json.dumps(fields), "format": "pt"}
    return file


def diffusion_pipe(family: str, weights: Tensors) -> ForeignFile:
    """peft's configuration beside a file of its name, with ComfyUI's keys."""
    file, draw = ForeignFile(name="adapter_model.safetensors"), Draw()
    names = []
    for layer in layers_of(family, weights, original=family != "qwen_image"):
        pair(file, draw, layer, f"diffusion_model.{layer.name}", A_B, None)
        names.append(layer.name)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        text = (Path(folder) / "adapter_config.json").read_text()
    file.beside = {"adapter_config.json": text}
    return file


def onetrainer(family: str, weights: Tensors) -> ForeignFile:
    """Of FLUX with '_' for '.', of Qwen-Image with the names of diffusers."""
    file, draw = ForeignFile(), Draw()
    for layer in layers_of(family, weights, original=False):
        key = f"transformer.{layer.name}"
        if family == "flux":
            key = f"lora_transformer_{layer.name.replace('.', '_')}"
        pair(file, draw, layer, key, DOWN_UP, ALPHA)
    return file


def kohya(family: str, weights: Tensors) -> ForeignFile:
    """sd-scripts of FLUX and SDXL, musubi-tuner of the others; of Z-Image it has diffusers' names."""
    file, draw = ForeignFile(), Draw()
    for layer in layers_of(family, weights, original=family != "z_image"):
        key = f"lora_unet_{layer.name.replace('.', '_')}"
        pair(file, draw, layer, key, DOWN_UP, ALPHA)
    return file


def kohya_lycoris(
    act: Callable[[ForeignFile, Draw, FileLayer, str], None],
) -> Callable[[str, Tensors], ForeignFile]:
    """LyCORIS in kohya's scripts: layers of the original network, fused or not."""

    def write(family: str, weights: Tensors) -> ForeignFile:
        file, draw = ForeignFile(), Draw()
        for layer in layers_of(family, weights, original=True):
            act(file, draw, layer, f"lora_unet_{layer.name.replace('.', '_')}")
        return file

    return write


def simpletuner_lycoris(family: str, weights: Tensors) -> ForeignFile:
    """LyCORIS' wrapper around diffusers' network: LoKr and LoHa by turns."""
    file, draw = ForeignFile(), Draw()
    for number, layer in enumerate(layers_of(family, weights, original=False)):
        act = loha if number % 2 else lokr
        act(file, draw, layer, f"lycoris_{layer.name.replace('.', '_')}")
    return file


XLABS = MappingProxyType(
    {
        "img_attn.qkv": "qkv_lora1",
        "txt_attn.qkv": "qkv_lora2",
        "img_attn.proj": "proj_lora1",
        "txt_attn.proj": "proj_lora2",
        "linear2": "proj_lora",
    }
)


def xlabs(family: str, weights: Tensors) -> ForeignFile:
    """Attention alone; in single blocks the queries, keys and values of `linear1`."""
    file, draw = ForeignFile(), Draw()
    for layer in layers_of(family, weights, original=True):
        blocks, number, name = layer.name.split(".", 2)
        key = f"{blocks}.{number}.processor"
        ends = ("down.weight", "up.weight")
        if name in XLABS:
            pair(file, draw, layer, f"{key}.{XLABS[name]}", ends, None)
        if name == "linear1":
            height = layer.shape[0] * 3 // 7
            parts = {
                one: part._replace(parts=3)
                for one, part in layer.parts.items()
                if part.stop <= 3
            }
            own = FileLayer(name, (height, layer.shape[1]), parts)
            pair(file, draw, own, f"{key}.qkv_lora", ends, None)
    return file


def lightx2v(family: str, weights: Tensors) -> ForeignFile:
    """A LoRA for fewer steps: no alpha, and differences of all other parameters."""
    file, draw = ForeignFile(options="@alpha=rank"), Draw()
    for layer in layers_of(family, weights, original=True):
        pair(file, draw, layer, f"diffusion_model.{layer.name}", DOWN_UP, None)
    for name, value in weights.items():
        if name in file.changes:
            continue
        # Its names of parameters are those of layers with an end.
        layer, _, end = name.rpartition(".")
        if end == "scale_shift_table":
            prefix = f"{layer}." if layer else "head."
            key = f"diffusion_model.{prefix}diff_m"
        else:
            part = part_of("comfyui", family, layer)
            assert part is not None
            key = f"diffusion_model.{part.layer}"
            key += ".diff_b" if end == "bias" else ".diff"
        difference = draw(*value.shape)
        file.tensors[key] = difference
        file.changes[name] = difference.double()
    return file


def lightning(family: str, weights: Tensors) -> ForeignFile:
    """LightX2V's Qwen-Image-Lightning: no prefix, and alpha."""
    file, draw = ForeignFile(), Draw()
    for layer in layers_of(family, weights, original=False):
        pair(file, draw, layer, layer.name, DOWN_UP, ALPHA)
    return file


EVERY = ("qwen_image", "flux", "flux2", "wan", "z_image")
OF_LYCORIS = ("qwen_image", "flux", "wan", "sdxl")
WRITERS: Mapping[str, tuple[Callable[[str, Tensors], ForeignFile], tuple[str, ...]]] = (
    MappingProxyType(
        {
            "diffusers, SimpleTuner": (diffusers, (*EVERY, "sdxl")),
            "ai-toolkit": (ai_toolkit, EVERY),
            "diffusion-pipe": (diffusion_pipe, ("qwen_image", "flux", "wan")),
            "OneTrainer": (onetrainer, ("qwen_image", "flux", "flux2")),
            "kohya, musubi-tuner": (kohya, (*EVERY, "sdxl")),
            "LyCORIS LoKr": (kohya_lycoris(lokr), OF_LYCORIS),
            "LyCORIS LoHa": (kohya_lycoris(loha), OF_LYCORIS),
            "SimpleTuner, LyCORIS": (
                simpletuner_lycoris,
                ("qwen_image", "flux", "flux2", "wan"),
            ),
            "XLabs": (xlabs, ("flux",)),
            "LightX2V": (lightx2v, ("wan",)),
            "Lightning": (lightning, ("qwen_image",)),
        }
    )
)
"""Program -> what writes its files, and the families that it trains."""
