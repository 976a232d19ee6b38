"""Tensors come back as they were written, and damage is named."""

import json
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, SystemFault
from dstrain.storage import (
    CHECKSUM,
    read_tensors,
    take_part,
    tensor_shapes,
    verify_file,
    write_tensors,
)
from dstrain.storage.safetensors import opened, read_rows
from safetensors.torch import save_file

from tests.support.machines import most_bytes

DTYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "bool"),
    *(
        f"float8_{name}"
        for name in ("e5m2", "e5m2fnuz", "e4m3fn", "e4m3fnuz", "e8m0fnu")
    ),
)
"""Those that the format has."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("limit", [0, 9, 100, 4000])
def test_a_size_limit_keeps_the_old_tensors(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {})
    before = path.read_bytes()
    with most_bytes(limit), pytest.raises(SystemFault, match="8,000") as caught:
        write_tensors(path, {"a": torch.ones(2000)}, {})
    assert caught.value.where == str(path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.safetensors"]


def test_the_shapes_in_a_file_larger_than_memory_are_read(tmp_path: Path) -> None:
    path, size = tmp_path / "large.safetensors", 2**42
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"a": entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    assert tensor_shapes(path) == (("a", (size,)),)


def test_memory_that_runs_out_is_no_fault_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {}, checksum=True)
    lacking = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(RuntimeError, match="allocate memory"), opened(path):
        raise lacking


def test_tensors_round_trip_of_every_kind(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": base,
        "tied": base,
        "view": base[1],
        "transposed": base.T,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "also_empty": torch.zeros(0),
        "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "grad": torch.ones(2, requires_grad=True),
        "long": torch.tensor([2**60]),
    }
    write_tensors(tmp_path / "a.safetensors", tensors, {"note": "é"})
    have, metadata = read_tensors(tmp_path / "a.safetensors")
    assert metadata == {"note": "é"}
    assert have.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert have[name].dtype == tensor.dtype
        assert torch.equal(have[name], tensor)
    for header in ({}, {"a": "b"}):
        write_tensors(tmp_path / "none", {}, header)
        assert read_tensors(tmp_path / "none") == ({}, header)


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    metadata = {name: name * 3 for name in "hgfedcbaé"}
    tensors = {"b": torch.ones(3), "a": torch.zeros(2)}
    turned = [dict(reversed(one.items())) for one in (tensors, metadata)]
    write_tensors(tmp_path / "a", tensors, metadata, checksum=True)
    write_tensors(tmp_path / "b", *turned, checksum=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_tensors(tmp_path / "a")[1].items() > metadata.items()


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"PK\x03\x04 no safetensors"])
def test_no_safetensors_file_is_a_state_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    for read in (read_tensors, tensor_shapes, verify_file):
        with pytest.raises(StateError) as caught:
            read(path)
        assert caught.value.where == str(path)


def test_a_file_is_verified_by_its_checksum_and_one_without_is_not_taken_for_dstrains(
    tmp_path: Path,
) -> None:
    tensors = {
        "a": torch.ones(2, 3, dtype=torch.bfloat16),
        "b": torch.arange(4).view(2, 2).T,
        "c": torch.zeros(()),
    }
    header = {"component": "dit"}
    ours, theirs, other = (tmp_path / name for name in ("ours", "theirs", "other"))
    write_tensors(ours, tensors, header, checksum=True)
    assert verify_file(ours)["component"] == "dit"
    write_tensors(theirs, tensors, header)
    assert read_tensors(theirs)[1] == header
    with pytest.raises(StateError, match=CHECKSUM):
        verify_file(theirs)
    write_tensors(other, tensors, {**read_tensors(ours)[1], "component": "vae"})
    for read in (verify_file, read_tensors):
        with pytest.raises(StateError) as caught:
            read(other)
        assert caught.value.where == str(other)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(2), "b": torch.ones(2)},
        {"a": torch.ones(2), "c": torch.ones(2)},
        {"a": torch.ones(2).double(), "b": torch.ones(2)},
        {"a": torch.ones(2, 1), "b": torch.ones(2)},
        {"a": torch.ones(2)},
    ],
    ids=["bytes", "name", "dtype", "shape", "one less"],
)
def test_a_checksum_covers_names_dtypes_shapes_and_bytes(
    tmp_path: Path, other: dict[str, torch.Tensor]
) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors, {}, checksum=True)
    write_tensors(path, other, read_tensors(path)[1])
    for read in (verify_file, read_tensors):
        with pytest.raises(StateError):
            read(path)


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {
        f"{number % 3}.{name}": torch.zeros(3, 5).to(getattr(torch, name))
        for number, name in enumerate(DTYPES)
    }
    tensors |= {"é": torch.ones(7), "none": torch.zeros(0, 2), "one": torch.ones(())}
    write_tensors(tmp_path / "ours", tensors, {"note": 'a "b" \n é'})
    save_file(tensors, tmp_path / "theirs", {"note": 'a "b" \n é'})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_dtype_that_files_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"complex128") as caught:
        write_tensors(tmp_path / "a", {"w": torch.zeros(1, dtype=torch.complex128)}, {})
    assert caught.value.where == "w"
    assert names(tmp_path) == []


class Scattered:
    """As a tensor of which each process has some rows; counts those put together."""

    alive = 0
    most = 0

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content
        self.shape, self.dtype = content.shape, content.dtype
        self.itemsize = content.itemsize
        self.device_mesh = self
        self.device_type = "cpu"

    def numel(self) -> int:
        return self.content.numel()

    def detach(self) -> "Scattered":
        return self

    def to(self, device: str) -> "Scattered":
        return self

    def full_tensor(self) -> torch.Tensor:
        made = self.content.clone()
        Scattered.alive += 1
        Scattered.most = max(Scattered.most, Scattered.alive)
        weakref.finalize(made.untyped_storage(), self._gone)
        return made

    @staticmethod
    def _gone() -> None:
        Scattered.alive -= 1


def test_scattered_tensors_are_put_together_one_by_one(tmp_path: Path) -> None:
    plain = {f"w{number}": torch.randn(4, 3) for number in range(5)}
    plain["low"] = torch.ones(3, dtype=torch.bfloat16)
    scattered: Any = {name: Scattered(value) for name, value in plain.items()}
    write_tensors(tmp_path / "plain", plain, {"a": "b"}, checksum=True)
    write_tensors(tmp_path / "scattered", scattered, {"a": "b"}, checksum=True)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "scattered").read_bytes()
    take_part(scattered)
    assert Scattered.most == 1
    assert verify_file(tmp_path / "plain")["a"] == "b"


def test_rows_of_tensors_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 2), "b": torch.ones(()), "c": torch.randn(3)}
    write_tensors(tmp_path / "file", tensors, {})
    asked = {}

    def rows(name: str, shape: list[int]) -> slice | None:
        asked[name] = shape
        return slice(1, 3) if name == "a" else None

    read = read_rows(tmp_path / "file", rows)
    assert asked == {"a": [5, 2], "b": [], "c": [3]}
    assert torch.equal(read["a"], tensors["a"][1:3])
    assert torch.equal(read["b"], tensors["b"])
    assert torch.equal(read["c"], tensors["c"])
    shapes = (("a", (5, 2)), ("b", ()), ("c", (3,)))
    assert tensor_shapes(tmp_path / "file") == shapes
