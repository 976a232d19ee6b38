"""Files of weights are open only while tensors are read from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.models import recognize, weight_files
from dstrain.models.weight_files import (
    OpenFiles,
    TensorInfo,
    refuse_quantized,
    shapes_in,
)
from dstrain.models.weights import Weights
from dstrain.plugin import Files
from safetensors.torch import save_file


def mapped(folder: Path) -> set[str]:
    """Return the names of the files in a folder that this process has mapped.

    Other tests of the process may hold files of their own.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [Path(line.split(maxsplit=5)[-1]) for line in lines]
    return {path.name for path in paths if path.is_relative_to(folder)}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_file_is_closed_after_its_last_weight(suffix: str, tmp_path: Path) -> None:
    paths = tuple(tmp_path / f"{number}.{suffix}" for number in range(3))
    for number, path in enumerate(paths):
        # The order of a network's weights is not that of its files.
        state = {f"{place}.{number}": torch.full((9,), number) for place in "ab"}
        torch.save(state, path) if suffix == "pth" else save_file(state, path)
    weights = Weights.of(Files(paths))
    wanted = {f"{place}.{number}": (9,) for place in "ab" for number in range(3)}
    seen: dict[str, set[str]] = {}
    for name, weight in weights.read(wanted, torch.float32):
        assert weight.tolist() == [int(name[-1])] * 9
        seen[name] = mapped(tmp_path)
    for number, path in enumerate(paths):
        assert seen[f"a.{number}"] == {path.name}
        assert seen[f"b.{number}"] == set()


def test_a_file_is_opened_anew_after_some_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.safetensors"
    save_file({str(number): torch.zeros(100) for number in range(10)}, path)
    monkeypatch.setattr(weight_files, "MAPPED", 1000)
    opened: list[Path] = []
    reader = weight_files._reader

    def counted(path: Path) -> Any:
        opened.append(path)
        return reader(path)

    monkeypatch.setattr(weight_files, "_reader", counted)
    weights = Weights.of(Files((path,)))
    wanted = {str(number): (100,) for number in range(10)}
    assert len(dict(weights.read(wanted, torch.float32))) == 10
    assert len(opened) == 4


def test_files_are_closed_where_reading_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.zeros(3)}, path)
    reading = Weights.of(Files((path,))).read({"a": (3,), "b": (3,)}, torch.float32)
    next(reading)
    assert mapped(tmp_path) == {"one.safetensors"}
    reading.close()  # type: ignore[attr-defined]  # a generator
    assert not mapped(tmp_path)


def test_a_tensor_that_cannot_be_read_is_named_with_its_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({name: torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    one = TensorInfo(tmp_path / "one.safetensors", "one", (3,))
    two = TensorInfo(tmp_path / "two.safetensors", "none", (3,))
    with (
        OpenFiles([one, one, two]) as files,
        files.reading(one, None),
        pytest.raises(StateError, match=r"two\.safetensors: cannot be read"),
        files.reading(two, None),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "how", "flag"),
    [
        ("scaled_fp8", "scaled fp8", "--fp8_models"),
        ("model.diffusion_model.blocks.0.q.scale_weight", "scaled fp8", "--fp8_models"),
        ("blocks.0.q.weight_scale", "scaled fp8", "--fp8_models"),
        ("blocks.0.q.comfy_quant", "scaled fp8", "--fp8_models"),
        ("a.weight.quant_state.bitsandbytes__nf4", "nf4", "bitsandbytes_nf4"),
        ("a.weight.absmax", "nf4", "bitsandbytes_nf4"),
        ("a.SCB", "nf4", "bitsandbytes_nf4"),
        ("transformer_blocks.0.attn.to_qkv.qweight", "SVDQuant", "int8_block"),
    ],
)
def test_weights_that_another_program_quantized_are_refused_with_what_to_give(
    name: str, how: str, flag: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(2, 2), name: torch.zeros(1)}, path)
    with pytest.raises(
        StateError, match=rf"has weights that are quantized \({how}"
    ) as caught:
        recognize(Files((path,)), ())
    (line,) = caught.value.help_lines
    assert (
        line.startswith("give the same model's file in bf16 or fp16") and flag in line
    )


def test_a_gguf_file_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(StateError, match="is a GGUF file, whose weights are quantized"):
        shapes_in(path)


def test_names_that_only_look_alike_are_read(tmp_path: Path) -> None:
    names = ("scale_shift_table", "blocks.0.scale", "norm.weight", "a.scale_weights")
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(1) for name in names}, path)
    refuse_quantized(path, names)
    assert set(shapes_in(path)) == set(names)


def test_a_dictionary_inside_itself_is_no_state_dict(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"a": torch.zeros(1)}
    weights["self"] = weights
    torch.save(weights, tmp_path / "model.pth")
    with pytest.raises(StateError, match="is not a state dict of tensors"):
        shapes_in(tmp_path / "model.pth")
