"""What an estimate is made of is found without weights, and what is unknown is said."""

import re
from pathlib import Path
from typing import Any

import pytest
from dstrain.cli.main import main
from dstrain.runs.memory.components import ComponentSize
from dstrain.runs.memory.facts import Facts

from tests.support.family import IDS

pytestmark = pytest.mark.usefixtures("tiny")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["--model", "tiny", "--dry_run", *words]) == 0
    return capsys.readouterr().out


def test_a_toy_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--toy", "--device_memory", "24")
    for name in ("dit", "text_encoder", "vae", "trained weights", "gradients", "peak"):
        assert f"\n    {name} " in out
    assert "a sample of 1024 x 1024 with a prompt of 512 letters" in out
    assert "it fits on --device_memory 24 (22.35 GiB)" in out


def test_a_component_without_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = printed(
        capsys,
        "--variant",
        "base",
        "--model_paths",
        '["no.safetensors"]',
        "--device_memory",
        "24",
    )
    assert re.search(r"\n    dit +not known  its configuration is not here\n", out)
    assert "whether it fits on --device_memory 24 (22.35 GiB) is not known" in out
    assert out.partition("\ndisk\n")[2].startswith("    weights files  not known\n")


def test_files_that_are_not_here_are_downloads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path))
    words = ["--variant", "base", "--device_memory", "24"]
    out = printed(capsys, "--model_id_with_origin_paths", IDS, *words)
    assert re.search(
        r"downloads +[\d.]+ KiB  about, if they are published in bf16", out
    )
    assert "downloads" not in printed(capsys, "--toy", *words)


def test_a_unit_that_needs_numbers_makes_it_unknown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise RuntimeError("needs numbers\nand more")

    monkeypatch.setattr("dstrain.runs.memory.facts.count_activations", fail)
    out = printed(capsys, "--toy", "--device_memory", "24")
    line = next(line for line in out.splitlines() if "activations" in line)
    assert (
        line.split("not known")[1].strip() == "RuntimeError('needs numbers\\nand more')"
    )
    assert re.search(r"peak +more than [\d.]+ GiB", out)
    assert "whether it fits on --device_memory 24 (22.35 GiB) is not known" in out


def test_a_stage_has_the_facts_of_its_own_components() -> None:
    sizes = {name: ComponentSize(name, "fp32", ()) for name in ("dit", "vae")}
    facts = Facts(sizes, ("clip",), None, "why", ("vae", "dit"))
    part = facts.of_components(("vae", "clip"))
    assert (set(part.components), part.unknown, part.absent) == (
        {"vae"},
        ("clip",),
        ("vae",),
    )
    assert part.origin == "why"
