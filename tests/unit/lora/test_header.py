"""A LoRA's header tells the weights and the variant it was trained for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from dstrain.lora import Lora, base_weights
from dstrain.lora.header import BLOCK_BYTES, BLOCKS, sample_digest, training_differences
from dstrain.plugin import Files

SIZE = BLOCKS * BLOCK_BYTES * 4


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(i % 251 for i in range(SIZE)))
    return path


def test_the_digest_depends_on_contents_and_not_on_names_or_order(
    weights: Path, tmp_path: Path
) -> None:
    moved, small = tmp_path / "moved", tmp_path / "small"
    moved.write_bytes(weights.read_bytes())
    small.write_bytes(b"1")
    assert len(sample_digest([weights])) == 40
    assert sample_digest([moved]) == sample_digest([weights])
    assert sample_digest([small, moved]) == sample_digest([weights, small])
    assert sample_digest([weights]) != sample_digest([weights, small])


@pytest.mark.parametrize("place", [0, SIZE - 1])
def test_the_digest_sees_the_first_and_the_last_byte(weights: Path, place: int) -> None:
    before = sample_digest([weights])
    content = bytearray(weights.read_bytes())
    content[place] ^= 1
    weights.write_bytes(content)
    assert sample_digest([weights]) != before


def test_the_digest_sees_another_size_and_reads_files_of_any_size(
    weights: Path, tmp_path: Path
) -> None:
    longer, empty = tmp_path / "longer", tmp_path / "empty"
    longer.write_bytes(weights.read_bytes() + b"\0")
    empty.write_bytes(b"")
    assert len({sample_digest([path]) for path in (weights, longer, empty)}) == 3


def test_a_base_has_its_model_id_if_there_is_one(weights: Path) -> None:
    files = Files((weights,))
    digest = sample_digest([weights])
    assert base_weights(files) == {"digest": digest}
    assert base_weights(replace(files, model_id="Some/Model")) == {
        "digest": digest,
        "model_id": "Some/Model",
    }


def differences(header: dict[str, str], variant: str, files: Files | None) -> list[str]:
    return list(training_differences(Lora("dit", {}, header), variant, files))


def test_only_what_differs_is_named(weights: Path, tmp_path: Path) -> None:
    files = Files((weights,))
    header = {"variant": "base", "base": json.dumps(base_weights(files))}
    assert differences(header, "base", files) == []
    assert differences(header, "base", None) == []
    assert differences({}, "base", files) == []
    further = tmp_path / "further.safetensors"
    further.write_bytes(weights.read_bytes()[::-1])
    assert differences(header, "edit", Files((further,))) == [
        "was trained for variant base, not edit",
        "was trained on other weights of dit (other files), not on further.safetensors",
    ]


@pytest.mark.parametrize("base", ["", "[]", "no", '"text"', "[" * 100_000])
def test_a_base_that_cannot_be_read_says_nothing(weights: Path, base: str) -> None:
    header = {"variant": "base", "base": base}
    assert differences(header, "base", Files((weights,))) == []
