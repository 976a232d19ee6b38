"""What training writes is applied at the right strength by others, with every layer used.

Each case is a training command of a family at toy sizes and a reader of the file it
writes: ComfyUI's and DiffSynth-Studio's rules as restated in
`tests/support/other_loaders.py`, diffusers' own loaders, and dstrain. The truth is what
was trained: base weights and unscaled matrices from the run's state, and alpha / rank.
Run it with -rP to see the errors.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain.cli.main import main
from dstrain.config import LoraFile
from dstrain.lora import base_shapes, read_lora
from dstrain.plugin import Column
from dstrain.registry import load_family
from dstrain.testing.family_under_test import FamilyUnderTest
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.diffusers_pipelines import PIPELINE_PARTS, PIPELINES
from tests.support.lora_family import merge_layers
from tests.support.other_loaders import comfyui, diffsynth, diffsynth_weights

ROUNDING = 1e-5
"""Greatest difference from the truth, as a part of its greatest value."""
PREFIX = ("--remove_prefix_in_ckpt", "pipe.dit.")
FLUX_TARGETS = (
    "--lora_target_modules",
    "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear,"
    "norm1_a.linear,norm1_b.linear,to_qkv_mlp",
)
WAN_TARGETS = ("--lora_target_modules", "q,k,v,o,ffn.0,ffn.2")


def lora_format(program: str) -> tuple[str, str]:
    return ("--lora_format", program)


@dataclass(frozen=True)
class Case:
    """A training command, and who reads what it writes."""

    family: str
    variant: str
    flags: tuple[str, ...]
    reader: str
    part: str = "dit"
    rank: int = 4
    alpha: float = 6.0

    @property
    def name(self) -> str:
        words = [word.removeprefix("--")[:24] for word in self.flags]
        strength = f"{self.alpha:g}-{self.rank}"
        return "-".join([self.variant, self.part, strength, *words, self.reader])


QWEN = Case("qwen_image", "base", (), "")
FLUX = Case("flux", "dev", (), "")
WAN = Case("wan", "t2v", (), "")
Z_IMAGE = Case("z_image", "base", (), "")
FLUX2 = Case("flux2", "klein", (), "")
SDXL = Case("sdxl", "base", (), "", part="unet")


def read_by(case: Case, flags: tuple[str, ...], *readers: str) -> list[Case]:
    return [replace(case, flags=flags, reader=reader) for reader in readers]


DENOISERS = MappingProxyType({"sdxl": "unet"})
"""Family -> what diffusers calls its denoiser, where not `transformer`."""
DIFFUSERS = ("diffusers_pipeline", "diffusers_adapter")
LORAS = (
    *read_by(QWEN, (), "comfyui", *DIFFUSERS, "dstrain"),
    *read_by(QWEN, PREFIX, "diffsynth", "comfyui", "dstrain"),
    *read_by(QWEN, lora_format("diffsynth"), "diffsynth"),
    *read_by(QWEN, lora_format("comfyui"), "comfyui", "diffsynth", "dstrain"),
    *read_by(QWEN, (*PREFIX, *lora_format("diffusers")), "comfyui", *DIFFUSERS),
    *read_by(replace(QWEN, variant="edit"), (), "comfyui", "diffusers_pipeline"),
    *read_by(replace(QWEN, variant="edit-2509"), PREFIX, "diffsynth"),
    *read_by(replace(QWEN, alpha=8.0), (), "comfyui", "dstrain"),
    *read_by(replace(QWEN, rank=8, alpha=2.0), PREFIX, "diffsynth", "comfyui"),
    *read_by(FLUX, (), "comfyui", "diffsynth", *DIFFUSERS, "dstrain"),
    *read_by(FLUX, PREFIX, "diffsynth", "dstrain"),
    *read_by(FLUX, (*PREFIX, *FLUX_TARGETS), "diffsynth", "dstrain"),
    *read_by(FLUX, FLUX_TARGETS, "comfyui", "diffusers_adapter"),
    *read_by(FLUX, lora_format("reference"), "diffsynth"),
    *read_by(FLUX, lora_format("comfyui"), "comfyui", "dstrain"),
    *read_by(FLUX, (*PREFIX, *lora_format("comfyui")), "comfyui"),
    *read_by(
        FLUX,
        (*PREFIX, "--align_to_opensource_format", *FLUX_TARGETS),
        "comfyui",
        "diffsynth",
        "dstrain",
    ),
    *read_by(replace(FLUX, variant="kontext"), (), "comfyui", "diffsynth"),
    *read_by(replace(FLUX, rank=3, alpha=0.7), PREFIX, "diffsynth"),
    *read_by(WAN, (), "comfyui_as_told", *DIFFUSERS, "dstrain"),
    *read_by(WAN, PREFIX, "diffsynth", "comfyui_as_told", "dstrain"),
    *read_by(WAN, (*PREFIX, *WAN_TARGETS), "diffsynth"),
    *read_by(WAN, lora_format("comfyui"), "comfyui", "diffsynth", "diffusers_pipeline"),
    *read_by(WAN, lora_format("diffsynth"), "diffsynth"),
    *read_by(replace(WAN, variant="i2v"), PREFIX, "diffsynth"),
    *read_by(replace(WAN, variant="i2v"), (), "comfyui_as_told", "dstrain"),
    *read_by(replace(WAN, variant="ti2v-5b"), PREFIX, "diffsynth"),
    *read_by(replace(WAN, variant="t2v-a14b", part="dit2"), PREFIX, "diffsynth"),
    *read_by(replace(WAN, variant="t2v-a14b", part="dit2"), (), "comfyui_as_told"),
    *read_by(replace(WAN, alpha=1.0), lora_format("comfyui"), "comfyui"),
    *read_by(Z_IMAGE, (), "comfyui", *DIFFUSERS, "dstrain"),
    *read_by(Z_IMAGE, PREFIX, "diffsynth", "comfyui", "dstrain"),
    *read_by(Z_IMAGE, lora_format("comfyui"), "comfyui", "diffusers_pipeline"),
    *read_by(replace(Z_IMAGE, variant="turbo", rank=3), PREFIX, "diffsynth"),
    *read_by(FLUX2, (), "comfyui", *DIFFUSERS, "dstrain"),
    *read_by(FLUX2, PREFIX, "diffsynth", "dstrain"),
    *read_by(FLUX2, lora_format("comfyui"), "comfyui", "dstrain"),
    *read_by(replace(FLUX2, variant="dev", rank=3), (), "comfyui", "dstrain"),
    *read_by(SDXL, (), "comfyui_as_told", *DIFFUSERS, "dstrain"),
    *read_by(SDXL, lora_format("kohya"), "comfyui", "diffusers_pipeline", "dstrain"),
    *read_by(SDXL, lora_format("comfyui"), "comfyui", "dstrain"),
)
FULL = (
    replace(QWEN, flags=PREFIX),
    replace(QWEN, flags=lora_format("diffsynth")),
    replace(FLUX, flags=PREFIX),
    replace(FLUX, flags=lora_format("reference")),
    replace(FLUX, flags=PREFIX, variant="kontext"),
    replace(WAN, flags=PREFIX),
    replace(WAN, flags=PREFIX, variant="i2v"),
    replace(WAN, flags=PREFIX, variant="ti2v-5b"),
    replace(WAN, flags=PREFIX, variant="t2v-a14b", part="dit2"),
    replace(FLUX2, flags=PREFIX),
    replace(Z_IMAGE, flags=PREFIX),
)
"""Commands that train a denoiser in full, in DiffSynth-Studio's names."""


@dataclass(frozen=True)
class Trained:
    """What a command wrote, and what it trained."""

    file: Path
    printed: str
    base: Mapping[str, Tensor]
    """The weights before training."""
    changes: Mapping[str, Tensor]
    """Weight -> what LoRA adds to it."""
    tested: FamilyUnderTest


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Any]:
    """A case's variant at toy sizes, with its dataset."""
    known: dict[tuple[str, str], FamilyUnderTest] = {}

    def get(case: Case) -> FamilyUnderTest:
        key = (case.family, case.variant)
        if key not in known:
            folder = tmp_path_factory.mktemp("-".join(key))
            known[key] = FamilyUnderTest(load_family(case.family), case.variant, folder)
        return known[key]

    return get


def command(case: Case, tested: FamilyUnderTest, output: Path) -> list[str]:
    inputs = tested.spec.inputs.items()
    optional = [
        name
        for name, source in inputs
        if isinstance(source, Column) and source.optional
    ]
    flags = {
        "model": case.family,
        "variant": case.variant,
        "dataset_base_path": tested.data,
        "extra_inputs": ",".join(optional),
        "mixed_precision": "no",
        "max_steps": 2,
        "learning_rate": 1e-2,
        "output_path": output,
    }
    words = ["--toy", *case.flags]
    for name, value in flags.items():
        words += [f"--{name}", str(value)] if value != "" else []
    return words


def lora_flags(case: Case) -> list[str]:
    return [
        *("--lora_base_model", case.part),
        *("--lora_rank", str(case.rank)),
        *("--lora_alpha", str(case.alpha)),
    ]


@pytest.fixture(scope="module")
def train(
    tested: Callable[[Case], FamilyUnderTest], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Trained]:
    """Run a case's command, once for all its readers."""
    known: dict[Case, Trained] = {}

    def get(case: Case) -> Trained:
        case = replace(case, reader="")
        if case in known:
            return known[case]
        subject = tested(case)
        output = tmp_path_factory.mktemp("out") / "run"
        assert main([*command(case, subject, output), *lora_flags(case)]) == 0
        network = subject.open().components[case.part]
        known[case] = Trained(
            output / "step-2.safetensors",
            (output / "logs/dstrain.log").read_text(),
            {name: value.double() for name, value in network.state_dict().items()},
            trained_changes(case, output),
            subject,
        )
        return known[case]

    return get


def matrices(case: Case, output: Path) -> dict[str, dict[str, Tensor]]:
    """Layer -> its A and B as they are trained, from the newest state."""
    state = load_file(output / "states/step-2/trainable.safetensors")
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        layer, _, end = name.removeprefix(f"{case.part}.").partition(".lora_")
        found.setdefault(layer, {})[end[0]] = value
    return found


def trained_changes(case: Case, output: Path) -> dict[str, Tensor]:
    scale = case.alpha / case.rank
    return {
        f"{layer}.weight": scale * pair["B"].double() @ pair["A"].double()
        for layer, pair in matrices(case, output).items()
    }


def check_equal(changes: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Compare; return the greatest difference, as a part of its layer's greatest value."""
    acting = {name for name, change in wanted.items() if change.any()}
    assert len(acting) >= len(wanted) / 2
    assert acting <= changes.keys()
    # Layers that no loss reaches are in the file, and no part of the state.
    assert not any(changes[name].any() for name in changes.keys() - wanted.keys())
    greatest = 0.0
    for name, change in wanted.items():
        got = changes.get(name, torch.zeros_like(change))
        most = max(change.abs().max().item(), 1e-9)
        part = (got - change).abs().max().item() / most
        assert part <= ROUNDING, name
        greatest = max(greatest, part)
    return greatest


# The readers: trained -> what is added to each weight.


def by_comfyui(case: Case, trained: Trained, tmp_path: Path) -> Mapping[str, Tensor]:
    applied = comfyui(case.family, trained.base, load_file(trained.file))
    assert applied.unused == set()
    assert "for ComfyUI:" not in trained.printed
    return applied.changes


def by_comfyui_as_told(
    case: Case, trained: Trained, tmp_path: Path
) -> Mapping[str, Tensor]:
    """After the command that the end of the run prints."""
    (line,) = [one for one in trained.printed.splitlines() if "for ComfyUI:" in one]
    words = shlex.split(line.partition("for ComfyUI:")[2])
    assert words[:2] == ["dstrain", "export"]
    assert words[-2] == str(trained.file)
    written = Path(words[-1])
    if not written.exists():
        assert main(words[1:]) == 0
    before = comfyui(case.family, trained.base, load_file(trained.file))
    assert before.unused
    applied = comfyui(case.family, trained.base, load_file(written))
    assert applied.unused == set()
    return applied.changes


def by_diffsynth(case: Case, trained: Trained, tmp_path: Path) -> Mapping[str, Tensor]:
    applied = diffsynth(case.family, trained.base, load_file(trained.file))
    assert applied.unused == set()
    return applied.changes


def by_diffusers_pipeline(
    case: Case, trained: Trained, tmp_path: Path
) -> Mapping[str, Tensor]:
    parts = trained.tested.open().components
    kind: Any = PIPELINES[case.family]
    given = {name: parts.get(own) for name, own in PIPELINE_PARTS[case.family].items()}
    pipeline = kind(**given, scheduler=None)
    pipeline.load_lora_weights(trained.file.parent, weight_name=trained.file.name)
    return peft_changes(getattr(pipeline, DENOISERS.get(case.family, "transformer")))


def by_diffusers_adapter(
    case: Case, trained: Trained, tmp_path: Path
) -> Mapping[str, Tensor]:
    """Without the header, as `load_lora_adapter` is given a file's tensors."""
    network: Any = trained.tested.open().components[case.part]
    prefix = DENOISERS.get(case.family, "transformer")
    network.load_lora_adapter(load_file(trained.file), prefix=prefix)
    return peft_changes(network)


def by_dstrain(case: Case, trained: Trained, tmp_path: Path) -> Mapping[str, Tensor]:
    """As LoRA layers, and merged into the weights: --lora and --preset_lora_path."""
    pipeline = trained.tested.open()
    pipeline.load_lora(trained.file)
    added = peft_changes(pipeline.components[case.part])
    merged = trained.tested.open().components[case.part]
    shapes = base_shapes(merged)
    family = trained.tested.family
    (lora,) = read_lora(LoraFile(trained.file), family, {case.part: shapes})
    merge_layers(merged.double(), lora.layers)
    state = merged.state_dict()
    changes = {name: state[name] - trained.base[name] for name in added}
    check_equal(changes, trained.changes)
    return added


def peft_changes(network: nn.Module) -> dict[str, Tensor]:
    changes = {}
    for name, module in network.named_modules():
        if hasattr(module, "get_delta_weight"):
            layer: Any = module
            (adapter,) = layer.lora_A
            changes[f"{name}.weight"] = layer.get_delta_weight(adapter).double()
    return changes


READERS: Mapping[str, Callable[[Case, Trained, Path], Mapping[str, Tensor]]] = (
    MappingProxyType(
        {
            "comfyui": by_comfyui,
            "comfyui_as_told": by_comfyui_as_told,
            "diffsynth": by_diffsynth,
            "diffusers_pipeline": by_diffusers_pipeline,
            "diffusers_adapter": by_diffusers_adapter,
            "dstrain": by_dstrain,
        }
    )
)


@pytest.mark.promise("R18", "what training writes acts at the right strength elsewhere")
@pytest.mark.parametrize("case", LORAS, ids=lambda case: case.name)
def test_a_lora_acts_as_it_was_trained(
    case: Case, train: Callable[[Case], Trained], tmp_path: Path
) -> None:
    trained = train(case)
    with torch.no_grad():
        changes = READERS[case.reader](case, trained, tmp_path)
    error = check_equal(changes, trained.changes)
    print(
        f"{case.family} {' '.join(case.flags) or 'default'}: {case.reader} {error:.1e}"
    )
    with safe_open(trained.file, framework="pt") as file:
        header = file.metadata()
    assert (header["rank"], header["alpha"]) == (str(case.rank), str(case.alpha))


@pytest.mark.promise("R18", "what training writes acts at the right strength elsewhere")
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_weights_in_full_fit_diffsynth_studios_network(
    case: Case, tested: Callable[[Case], FamilyUnderTest], tmp_path: Path
) -> None:
    """Its `load_state_dict` is strict; and dstrain reads them as what was trained."""
    subject = tested(case)
    words = [*command(case, subject, tmp_path / "out"), "--trainable_models", case.part]
    assert main(words) == 0
    file = tmp_path / "out/step-2.safetensors"
    opened = subject.open(subject.with_file(case.part, file))
    weights = opened.components[case.part].state_dict()
    before = subject.open().components[case.part].state_dict()
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    wanted = diffsynth_weights(case.family, weights)
    tensors = load_file(file)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], value) for name, value in wanted.items())
    again = [*command(case, subject, tmp_path / "more"), "--resume_from_checkpoint"]
    assert main([*again, str(file), "--trainable_models", case.part]) == 0


BLOCK = MappingProxyType(
    {
        "qwen_image": "transformer_blocks.0",
        "flux": "transformer_blocks.0",
        "wan": "blocks.0",
    }
)
"""The first block of each denoiser, by its name in diffusers."""


def of_types(case: Case) -> Mapping[str, list[str]]:
    """Flags of layers that are not all alike, or not plain LoRA."""
    ranks = ["--lora_rank", f"4,{BLOCK[case.family]}=2", "--lora_alpha", "6"]
    lokr = ["--lora_type", "lokr", "--lora_alpha", "3", "--lora_rank"]
    return {
        "ranks": ranks,
        "dora": ["--lora_type", "dora", "--lora_rank", "4", "--lora_alpha", "6"],
        "dora of ranks": ["--lora_type", "dora", *ranks, "--lora_dropout", "0.1"],
        "lokr": [*lokr, "4"],
        "lokr of factor 4": [*lokr, "2", "--lokr_factor", "4"],
    }


@pytest.mark.promise("R18", "what training writes acts at the right strength elsewhere")
@pytest.mark.parametrize("types", of_types(QWEN))
@pytest.mark.parametrize("case", [QWEN, FLUX, WAN], ids=lambda case: case.family)
def test_layers_of_every_type_act_in_diffusers_and_come_back_from_others(
    case: Case, types: str, tested: Callable[[Case], FamilyUnderTest], tmp_path: Path
) -> None:
    subject = tested(case)
    words = command(case, subject, tmp_path / "out")
    flags = ["--lora_base_model", case.part, *of_types(case)[types]]
    assert main([*words, *flags]) == 0
    file = tmp_path / "out/step-2.safetensors"
    ours = subject.open()
    ours.load_lora(file)
    theirs: Any = subject.open().components[case.part]
    is_lokr = types.startswith("lokr")
    # Of LoRA diffusers reads the ranks in the header.
    with safe_open(file, framework="pt") as opened:
        text = opened.metadata().get("lora_adapter_metadata", "null")
    header = json.loads(text)
    theirs.load_lora_adapter(load_file(file), prefix="transformer", metadata=header)
    layers = [
        (name, layer)
        for name, layer in ours.components[case.part].named_modules()
        if hasattr(layer, "lokr_w1" if is_lokr else "lora_A")
    ]
    for name, layer in layers:
        x = torch.randn(2, layer.in_features)
        with torch.no_grad():
            assert torch.equal(layer(x), theirs.get_submodule(name)(x))
    keys = load_file(file)
    assert len(layers) == len({re.split(r"\.lo(?:ra|kr)_", key)[0] for key in keys})
    # In FLUX's other names queries, keys and values are one layer, which no LoKr is.
    for program in () if is_lokr and case.family == "flux" else ("comfyui", "kohya"):
        there, back = tmp_path / f"{program}.safetensors", tmp_path / f"{program}-2"
        assert main(["export", "--format", program, str(file), str(there)]) == 0
        assert main(["export", "--format", "diffusers", str(there), str(back)]) == 0
        after = load_file(back)
        assert keys.keys() == after.keys()
        assert all(torch.equal(keys[key], after[key]) for key in keys)
