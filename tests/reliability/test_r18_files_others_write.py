"""What other programs write acts here as it was trained there, with every key used.

Each case is a file with the names, matrices and alpha of a program, as restated in
`tests/support/other_writers.py`. It is used as `--lora`, times a factor, and merged as
`--preset_lora_path` does it. Run it with -rP to see the errors.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from dstrain.config import parse_lora
from dstrain.lora import base_shapes, merge, read_lora
from dstrain.registry import load_family
from dstrain.testing.family_under_test import FamilyUnderTest
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.diffusers_pipelines import PIPELINE_PARTS, PIPELINES
from tests.support.lora_family import merge_layers
from tests.support.other_loaders import comfyui
from tests.support.other_writers import WRITERS, ForeignFile

VARIANTS = {
    **dict.fromkeys(("qwen_image", "z_image", "sdxl"), "base"),
    "flux": "dev",
    "flux2": "klein",
    "wan": "t2v",
}
ROUNDING = 2e-6
"""Greatest difference from the truth, as a part of its greatest value."""
SCALE = 0.75
NOT_BY_COMFYUI = frozenset(
    {
        # It looks for alpha in keys alone.
        *(("diffusers, SimpleTuner", family) for family in VARIANTS),
        # By these names it looks for its own layers, which hold several.
        ("kohya, musubi-tuner", "z_image"),
        ("SimpleTuner, LyCORIS", "wan"),
        ("XLabs", "flux"),
    }
)
"""Files that ComfyUI does not use, or not at the strength of the training."""


class Case(NamedTuple):
    """A program, and the family that it trained."""

    program: str
    family: str


CASES = [
    Case(program, family)
    for program, (_, families) in WRITERS.items()
    for family in families
]


@pytest.fixture(scope="module")
def tested(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], FamilyUnderTest]:
    """A family's variant at toy sizes."""
    known: dict[str, FamilyUnderTest] = {}

    def get(name: str) -> FamilyUnderTest:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            family = load_family(name)
            known[name] = FamilyUnderTest(family, VARIANTS[name], folder)
        return known[name]

    return get


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's weights with those of its LoRA layers added, in fp64."""
    found = {
        name.replace(".base_layer.", "."): value.double()
        for name, value in network.state_dict().items()
        if "lora_" not in name and "lokr_" not in name
    }
    for name, module in network.named_modules():
        if hasattr(module, "get_delta_weight"):
            layer: nn.Module = module
            for adapter in layer.active_adapters:  # type: ignore[union-attr]  # of peft, untyped
                change: Tensor = layer.get_delta_weight(adapter)  # type: ignore[operator]  # of peft, untyped
                found[f"{name}.weight"] = found[f"{name}.weight"] + change.double()
    return found


def error_of(
    found: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    file: ForeignFile,
    scale: float,
) -> float:
    """Return the greatest difference from what a file is to change, as a part of that."""
    assert found.keys() == base.keys()
    assert file.changes.keys() <= base.keys()
    most = 0.0
    for name, weight in base.items():
        change = found[name] - weight
        if name not in file.changes:
            assert not change.any(), name
            continue
        wanted = scale * file.changes[name]
        part = (change - wanted).abs().max() / wanted.abs().max()
        most = max(most, part.item())
    return most


@pytest.mark.promise("R18", "what training writes acts at the right strength elsewhere")
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.family}-{case.program}"
)
@torch.no_grad()
def test_a_file_of_another_program_acts_here_as_it_does_there(
    case: Case, tested: Callable[[str], FamilyUnderTest], tmp_path: Path
) -> None:
    subject = tested(case.family)
    pipeline = subject.open()
    part = subject.family.default_trainable
    network = pipeline.components[part]
    base = state_of(network)
    write, _ = WRITERS[case.program]
    file = write(case.family, base)
    assert len(file.changes) >= 10
    path = tmp_path / file.name
    save_file(file.tensors, path, file.header)
    for name, text in file.beside.items():
        (tmp_path / name).write_text(text)
    named = parse_lora(f"{path}:{SCALE}{file.options}")
    pipeline.load_lora(named.path, named.scale, alpha=named.alpha)
    as_layers = error_of(state_of(network), base, file, SCALE)
    merged = subject.open().components[part]
    (lora,) = read_lora(
        replace(named, component=part), subject.family, {part: base_shapes(merged)}
    )
    merge_layers(merged, lora.layers)
    merge(merged, lora.merged)
    as_weights = error_of(state_of(merged), base, file, 1.0)
    print(f"{case.family}, {case.program}: {as_layers:.1e}, merged {as_weights:.1e}")
    assert max(as_layers, as_weights) <= ROUNDING
    if case not in NOT_BY_COMFYUI:
        there = comfyui(case.family, base, file.tensors)
        # LightX2V alone reads its own name for a modulation.
        assert {key for key in there.unused if not key.endswith(".diff_m")} == set()
        for name in [name for name in file.changes if name.endswith("_table")]:
            del file.changes[name]
        assert there.changes.keys() == file.changes.keys()
        for name, change in there.changes.items():
            assert torch.allclose(change, file.changes[name], rtol=1e-9), name


BY_DIFFUSERS = [
    case
    for case in CASES
    if case.program in ("diffusers, SimpleTuner", "ai-toolkit", "XLabs", "Lightning")
    # Of FLUX, its converters of other names take the published widths alone.
    or (
        case.program in ("diffusion-pipe", "kohya, musubi-tuner")
        and case.family != "flux"
    )
]
"""Files that the loaders of diffusers' pipelines take whole at these sizes."""


@pytest.mark.promise("R18", "what training writes acts at the right strength elsewhere")
@pytest.mark.parametrize(
    "case", BY_DIFFUSERS, ids=lambda case: f"{case.family}-{case.program}"
)
@torch.no_grad()
def test_diffusers_own_loader_makes_the_same_of_such_a_file(
    case: Case, tested: Callable[[str], FamilyUnderTest], tmp_path: Path
) -> None:
    """So the rules that are restated are not ours alone."""
    subject = tested(case.family)
    parts = subject.open().components
    network = parts[subject.family.default_trainable]
    base = state_of(network)
    write, _ = WRITERS[case.program]
    file = write(case.family, base)
    save_file(file.tensors, tmp_path / file.name, file.header)
    given = {name: parts.get(own) for name, own in PIPELINE_PARTS[case.family].items()}
    pipeline = PIPELINES[case.family](**given, scheduler=None)
    pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    assert error_of(state_of(network), base, file, 1.0) <= ROUNDING
