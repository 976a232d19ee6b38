"""Weights are found in files by their names, and files are open only meanwhile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.models import NATIVE, recognize
from dstrain.models.weights import Weights
from dstrain.plugin import CheckpointFormat, Component, Files, KeyMap
from safetensors.torch import save_file
from torch import Tensor

LAYOUT = CheckpointFormat(
    key_patterns=("blocks.*.qkv.weight",),
    rows=(
        KeyMap("layers.*.mix.*.q", "blocks.*.*.qkv", 0, 1, 3),
        KeyMap("layers.*.mix.*.k", "blocks.*.*.qkv", 1, 2, 3),
        KeyMap("layers.*.mix.*.v", "blocks.*.*.qkv", 2, 3, 3),
        KeyMap("", "model"),
    ),
    ignored=("log.*",),
)
SUFFIXES = pytest.mark.parametrize("suffix", ["safetensors", "pth"])


def component(name: str, *key_patterns: str, **fields: Any) -> Component:
    return Component(name, SimpleNamespace(), name, key_patterns, **fields)


def saved(path: Path, weights: dict[str, Tensor]) -> Path:
    is_safe = path.suffix == ".safetensors"
    save_file(weights, path) if is_safe else torch.save(weights, path)
    return path


def written(path: Path, *names: str) -> Files:
    """A file of weights of these names."""
    return Files((saved(path, {name: torch.zeros(1) for name in names}),))


@SUFFIXES
def test_weights_are_read_in_the_dtype_asked_for(suffix: str, tmp_path: Path) -> None:
    """In memory of their own, whatever becomes of the file."""
    whole = torch.arange(12.0).reshape(6, 2).half()
    state = {
        "net.blocks.0.0.qkv.weight": whole,
        "net.ids": torch.tensor([1, 2]),
        "net.model.w": whole.t(),
    }
    if suffix == "safetensors":
        state = {name: one.contiguous() for name, one in state.items()}
    path = saved(tmp_path / f"x.{suffix}", state)
    weights = Weights.of(Files((path,), prefix="net.", checkpoint_format=LAYOUT))
    k = "layers.0.mix.0.k.weight"
    assert weights.shapes[k] == (2, 2)
    wanted: dict[str, tuple[int, ...]] = {k: (2, 2, 1), "ids": (2,), "w": (2, 6)}
    read = dict(weights.read(wanted, torch.float32))
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(read[k], whole[2:4, :, None].float())
    assert torch.equal(read["ids"], torch.tensor([1, 2]))
    assert torch.equal(read["w"], whole.t().float())
    assert all(weight.is_contiguous() for weight in read.values())


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path / "1.safetensors", "a").paths
    second = written(tmp_path / "2.pth", "b", "a").paths
    with pytest.raises(StateError, match=r"2\.pth: 'a' .* 1\.safetensors"):
        Weights.of(Files((*first, *second)))


@pytest.mark.parametrize("shape", [(2, 4), (2,), ()])
def test_parts_of_one_weight_that_differ_in_shape_are_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    layout = CheckpointFormat(rows=(KeyMap("kv", "k"), KeyMap("kv", "v")))
    tensors = {"k": torch.zeros(2, 3), "v": torch.zeros(shape)}
    path = saved(tmp_path / "x.safetensors", tensors)
    weights = Weights.of(Files((path,), checkpoint_format=layout))
    with pytest.raises(StateError, match=r"x\.safetensors: k, v: parts"):
        _ = weights.shapes


def test_reading_a_torch_file_copies_what_is_asked_for_alone(tmp_path: Path) -> None:
    """Dictionaries in it are parts of names."""
    weights: dict[str, Any] = {"large": torch.zeros(1 << 20)}
    weights["adapter"] = {"0.k.weight": torch.ones(2)}
    torch.save(weights, tmp_path / "model.bin")
    there = Weights.of(Files((tmp_path / "model.bin",)))
    assert there.shapes == {"large": (1 << 20,), "adapter.0.k.weight": (2,)}
    read = dict(there.read({"adapter.0.k.weight": (2,)}, torch.float32))
    assert read["adapter.0.k.weight"].tolist() == [1, 1]
    assert read["adapter.0.k.weight"].untyped_storage().nbytes() == 8


def mapped(folder: Path) -> set[str]:
    """The names of the files in a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [Path(line.split(maxsplit=5)[-1]) for line in lines]
    return {path.name for path in paths if path.is_relative_to(folder)}


@SUFFIXES
def test_a_file_is_closed_after_its_last_weight(suffix: str, tmp_path: Path) -> None:
    """The order of a network's weights is not that of its files."""
    paths = tuple(tmp_path / f"{number}.{suffix}" for number in range(3))
    for number, path in enumerate(paths):
        one = torch.full((9,), number)
        saved(path, {f"a.{number}": one, f"b.{number}": one.clone()})
    wanted = {f"{place}.{number}": (9,) for place in "ab" for number in range(3)}
    seen: dict[str, set[str]] = {}
    for name, weight in Weights.of(Files(paths)).read(wanted, torch.float32):
        assert weight.tolist() == [int(name[-1])] * 9
        seen[name] = mapped(tmp_path)
    for number, path in enumerate(paths):
        assert seen[f"a.{number}"] == {path.name}
        assert seen[f"b.{number}"] == set()


DIT = component(
    "dit",
    "proj.weight",
    formats=(LAYOUT,),
    prefixes=("model.diffusion_model.", "diffusion_model."),
)
VAE = component("vae", "encoder.*", "decoder.*", prefixes=("vae.",))
TOKENS = component("tokenizer")


def found(
    files: Files, *components: Component
) -> list[tuple[list[str], str, CheckpointFormat]]:
    return [
        ([c.name for c in fitting], part.prefix, part.checkpoint_format)
        for fitting, part in recognize(files, components)
    ]


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model."])
def test_a_component_is_known_by_its_names_behind_any_of_its_prefixes(
    prefix: str, tmp_path: Path
) -> None:
    own = written(tmp_path / "own.safetensors", f"{prefix}proj.weight", f"{prefix}more")
    other = written(tmp_path / "other.pth", f"{prefix}blocks.0.0.qkv.weight")
    assert found(own, DIT, VAE, TOKENS) == [(["dit"], prefix, NATIVE)]
    assert found(other, DIT, VAE, TOKENS) == [(["dit"], prefix, LAYOUT)]


def test_files_that_are_no_model_by_themselves_are_named(tmp_path: Path) -> None:
    for name in ("proj.lora_A.weight", "lora_unet_proj.lora_down.weight", "a.lokr_w1"):
        lora = written(tmp_path / "lora.safetensors", name)
        with pytest.raises(StateError, match=r"dit; (?s:.*)--lora .*--lora_checkpoint"):
            recognize(lora, (DIT,))
    more = written(tmp_path / "x.pth", "diffusion_model.proj.weight", "strange")
    with pytest.raises(StateError, match=r"1 of its names .* dit: strange"):
        recognize(more, (DIT,))
    every = [str(tmp_path / f"model-0000{one}-of-00002.safetensors") for one in (1, 2)]
    shard = written(Path(every[1]), "part.weight")
    with pytest.raises(StateError, match=r"model-00001-of-00002.*--model_paths"):
        recognize(shard, (DIT,))
    whole = Files((*written(Path(every[0]), "first.weight").paths, *shard.paths))
    with pytest.raises(StateError) as caught:
        recognize(whole, (DIT,))
    assert not caught.value.help_lines
