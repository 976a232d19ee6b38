"""Train a Qwen-Image of published width with 12 of its 60 blocks through the command line:
weights stored as fp8, blocks swapped, and count what is present.

Its weights are random, about 8 GiB in bf16, written block by block; the text encoder and
the VAE are of toy sizes, with outputs of the published widths. On a CPU, "present" is what
would be on a GPU: copies of swapped blocks.
"""

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel
from dstrain.cli.main import main as dstrain
from dstrain.models.execution import repeated_blocks
from dstrain.registry import load_family
from dstrain_memory.ram import WeightsInRam
from dstrain_qwen_image.components import CONFIGS
from dstrain_qwen_image.toy import TOY
from PIL import Image
from report import table
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

GIB = 2**30
TINY = {
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": [8, 12, 12],
}
HEAD = 16
"""Size of a head of the toy's text encoder."""


@dataclass
class Present:
    """Copies of weights that live in RAM."""

    storages: list[StorageWeakRef] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    largest: int = 0
    most: int = 0
    most_bytes: int = 0
    loads: int = 0

    def note(self, copy: Tensor) -> None:
        """Count a copy, with those that are still there."""
        pairs = zip(self.storages, self.sizes, strict=True)
        alive = [(storage, size) for storage, size in pairs if not storage.expired()]
        alive.append((StorageWeakRef(copy.untyped_storage()), copy.nbytes))
        self.storages = [storage for storage, _ in alive]
        self.sizes = [size for _, size in alive]
        self.largest = max(self.largest, copy.nbytes)
        self.most = max(self.most, len(alive))
        self.most_bytes = max(self.most_bytes, sum(self.sizes))
        self.loads += 1


@contextmanager
def counted() -> Iterator[Present]:
    """Count the copies that are made inside."""
    seen = Present()
    load = WeightsInRam.load

    def counting(self: WeightsInRam) -> Tensor:
        copy = load(self)
        seen.note(copy)
        return copy

    with patch.object(WeightsInRam, "load", counting):
        yield seen


def write_model(folder: Path, config: dict[str, Any]) -> int:
    """Write the model; returns the bytes of the denoiser."""
    width = config["joint_attention_dim"]
    toy = TOY["networks"]["text_encoder"]
    heads = width // HEAD
    text = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 1}
    sizes = {
        "text_encoder": {
            "text_config": toy["text_config"] | text,
            "vision_config": toy["vision_config"] | {"out_hidden_size": width},
        }
    }
    load_family("qwen_image").load("toy")(folder, "base", 0, sizes)
    place = folder / "transformer"
    for path in place.iterdir():
        path.unlink()
    with init_empty_weights():
        network = QwenImageTransformer2DModel(**config)
    network.save_config(place)
    blocks = repeated_blocks(network)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, weight in network.state_dict().items():
        block = next((one for one in blocks if name.startswith(f"{one}.")), "")
        parts.setdefault(block, {})[name] = weight.shape
    total = 0
    for number, shapes in enumerate(parts.values(), 1):
        weights = {}
        for name, shape in shapes.items():
            weight = torch.empty(shape, dtype=torch.bfloat16)
            is_norm = "norm" in name and len(shape) == 1
            weights[name] = weight.fill_(1) if is_norm else weight.normal_(0, 0.02)
            total += weight.nbytes
        file = f"diffusion_pytorch_model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(weights, place / file)
        print(f"wrote {file}: {total / GIB:.2f} GiB so far", flush=True)
    return total


def command_line(folder: Path, cache: Path, flags: tuple[str, ...]) -> list[str]:
    """Return the flags of both stages."""
    places = (
        folder / "model" / part for part in ("transformer", "text_encoder", "vae")
    )
    files = [sorted(map(str, place.glob("*.safetensors"))) for place in places]
    return [
        *("--model", "qwen_image", "--model_paths", json.dumps(files)),
        *("--dataset_base_path", str(folder / "data"), "--feature_cache", str(cache)),
        *("--output_path", str(folder / "out"), "--mixed_precision", "bf16"),
        *("--lora_rank", "16", "--max_steps", "2", "--save_steps", "2", *flags),
    ]


def train(folder: Path, side: int, flags: tuple[str, ...]) -> tuple[Present, float]:
    """Run both stages; returns what was present, and the seconds of the second."""
    data = folder / "data"
    data.mkdir()
    image = Image.effect_noise((side, side), 40).convert("RGB")
    image.save(data / "0.png")
    (data / "metadata.csv").write_text("image,prompt\n0.png,a dog on a bridge\n")
    line = command_line(folder, folder / "cache", (*flags, "--dataset_repeat", "2"))
    if dstrain(["--task", "sft:data_process", *line]):
        raise click.ClickException("stage 1 failed")
    start = time.perf_counter()
    with counted() as seen:
        if dstrain(["--task", "sft:train", *line]):
            raise click.ClickException("stage 2 failed")
    return seen, time.perf_counter() - start


@click.command()
@click.option("--layers", default=12, help="How many of its 60 blocks it has.")
@click.option("--swap", default=11, help="How many of these are swapped; 0 for none.")
@click.option("--method", default="fp8", help="How weights are stored; none for bf16.")
@click.option("--side", default=128, help="Height and width of the image in pixels.")
@click.option("--tiny", is_flag=True, help="Of toy width.")
@click.option("--folder", type=Path, help="Where to write; by default, temporary.")
def main(
    layers: int, swap: int, method: str, side: int, tiny: bool, folder: Path | None
) -> None:
    """Train two steps, and print what was present and how long it took."""
    config = json.loads((CONFIGS / "dit.json").read_text()) | {"num_layers": layers}
    if tiny:
        config |= TINY
    flags: tuple[str, ...] = ("--use_gradient_checkpointing",)
    if method != "none":
        flags += ("--quant_options", f"dit:{method}")
    if swap:
        flags += ("--blocks_to_swap", str(swap))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        written = write_model(place / "model", config)
        seen, seconds = train(place, side, flags)
        text = (place / "out/logs/loss.jsonl").read_text()
    steps = [json.loads(one) for one in text.splitlines()]
    if not all(abs(step["loss"]) < float("inf") for step in steps):
        raise click.ClickException("a loss is not finite")
    if seen.most > 2:
        raise click.ClickException(f"{seen.most} blocks were present at once")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = [
        ("denoiser in bf16", f"{written / GIB:.3f} GiB"),
        ("largest swapped block, as stored", f"{seen.largest / GIB:.4f} GiB"),
        ("blocks present at most", f"{seen.most}: {seen.most_bytes / GIB:.4f} GiB"),
        ("copies of blocks", f"{seen.loads} in {len(steps)} steps"),
        ("losses", ", ".join(f"{step['loss']:.4f}" for step in steps)),
        (
            "seconds a step",
            ", ".join(f"{1 / step['samples_per_second']:.1f}" for step in steps),
        ),
        ("seconds of stage 2, loading included", f"{seconds:.0f}"),
        ("peak memory of the process, mapped files included", f"{peak:.2f} GiB"),
    ]
    print(table(("", ""), rows))


if __name__ == "__main__":
    main()
