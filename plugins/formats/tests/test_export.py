"""`dstrain export`: a LoRA or a checkpoint in another program's names, whole or not at
all, and back again.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain.cli.main import main
from dstrain.plugin import Files
from dstrain.storage import CHECKSUM, read_tensors, verify_file
from safetensors.torch import load_file

from tests.support.lora_family import (
    COMPONENTS,
    DIT,
    MODEL,
    ORIGINAL,
    SHAPES,
    SPEC,
    adapter,
    as_trained,
    network,
    ours,
    output,
    read,
    same,
    with_alpha,
    written,
)

CONFIG = {"component": "dit", "config": json.dumps({"width": 6})}
PROGRAMS = ("diffusers", "comfyui", "kohya", "diffsynth")
TWO = MappingProxyType({"dit": SHAPES, "dit2": SHAPES})
UNBUILT = tuple(
    replace(one, network=SimpleNamespace(load=DIT.load, configure=DIT.configure))
    if one.name == "text_encoder"
    else one
    for one in COMPONENTS
)
"""Components of which one tells no shapes without its weights."""
FAMILY = replace(MODEL, name="unbuilt", components=f"{__name__}:UNBUILT")


@pytest.fixture(autouse=True)
def families(fake_plugin: Callable[..., Path]) -> None:
    """The families of these tests, installed."""
    entries = {
        "fused": "tests.support.lora_family:MODEL",
        "unbuilt": f"{__name__}:FAMILY",
    }
    fake_plugin("plugin-fused", entries, {})


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return run(flags, input, output), which returns what is printed; words: what the
    error names of one that is refused with this exit code.
    """

    def run(
        flags: str, source: Any, target: Any, code: int = 0, words: str = ""
    ) -> str:
        capsys.readouterr()
        found = main(["export", *flags.split(), str(source), str(target)])
        printed = "".join(capsys.readouterr())
        assert found == code, printed
        assert re.search(words, printed), printed
        return printed

    return run


def test_from_any_program_to_any_other_and_back(
    tmp_path: Path, export: Callable[..., str]
) -> None:
    ranks = replace(SPEC, ranks=(("to_q", 2),))
    path, _ = ours(tmp_path, ranks, **CONFIG, step="7")
    original = read(path)
    before = read_tensors(path)[1]
    programs = "comfyui diffusers kohya comfyui kohya diffsynth kohya diffusers"
    programs = f"{programs} diffsynth comfyui diffsynth diffusers diffusers"
    for number, program in enumerate(programs.split()):
        path, source = tmp_path / f"{number}.safetensors", path
        printed = export(f"--format {program}", source, path)
        # Alpha that a file of ours has in its header is no guess.
        found = read(path)
        assert re.search(rf"{path}: .* 12 .* dit, .* {program}.*, \d+ ", printed)
        assert found.header["alpha"] == "6.0"
        assert same(found.layers, original.layers)
        header = dict(verify_file(path))
        fields = header.pop("lora_adapter_metadata", None)
        assert (fields is not None) == (program == "diffusers")
        assert header == {
            name: header[CHECKSUM] if name == CHECKSUM else value
            for name, value in before.items()
            if name != "lora_adapter_metadata"
        }
    assert json.loads(fields or "") == json.loads(before["lora_adapter_metadata"])
    export("--format kohya --overwrite", path, path)
    assert "lora_unet_double_0_proj.alpha" in load_file(path)
    assert same(read(path).layers, original.layers)


@pytest.mark.parametrize("program", PROGRAMS)
def test_alpha_of_another_file_becomes_part_of_b_and_is_kept_in_the_header(
    program: str, tmp_path: Path, export: Callable[..., str]
) -> None:
    header = {"family": "fused", "alpha": "32", **CONFIG, **adapter()}
    older = written(tmp_path / "older.safetensors", as_trained(), header)
    path = tmp_path / "x.safetensors"
    export(f"--format {program}", older, path)
    made, before = read(path), read(older).layers
    assert {layer.scale for layer in made.layers.values()} == {1.0}
    assert same(made.layers, read(ours(tmp_path)[0]).layers)
    assert made.header["alpha"] == "6.0"
    for name, layer in made.trained_layers(older).items():
        assert layer.alpha == 6.0
        assert torch.allclose(layer.up, before[name].up, rtol=1.2e-7, atol=0)


def test_layers_of_unlike_dtypes_are_joined(
    tmp_path: Path, export: Callable[..., str]
) -> None:
    own, again = tmp_path / "own.safetensors", tmp_path / "again.safetensors"
    halves = {
        key: one.half() if "to_q" in key else one
        for key, one in as_trained().items()
        if "to_out" not in key
    }
    written(own, halves, {"family": "fused", "scale": "in lora_B"})
    export("--format comfyui", own, again)
    key = "diffusion_model.double.0.qkv.lora_down.weight"
    assert load_file(again)[key].shape == (12, 6)


@pytest.mark.parametrize(("given", "ratio"), [("rank", 1.0), ("6", 1.5)])
def test_an_alpha_that_a_file_does_not_state_can_be_given(
    given: str, ratio: float, tmp_path: Path, export: Callable[..., str]
) -> None:
    tensors = as_trained()
    lost = written(tmp_path / "lost.safetensors", tensors)
    path, named = tmp_path / "x.safetensors", tmp_path / "named.safetensors"
    flags = "--format diffusers --model fused"
    export(flags, lost, path, 3, f"{lost}@alpha=rank")
    export(f"{flags} --alpha {given}", lost, path)
    made = read(path)
    assert {layer.scale for layer in made.layers.values()} == {1.0}
    assert float(made.header["alpha"]) == 4 * ratio
    ups = {name: one for name, one in tensors.items() if "lora_B" in name}
    assert all(
        torch.equal(load_file(path)[name], one * ratio) for name, one in ups.items()
    )
    # In the names that it has: nothing else needs to be known.
    assert " 12 " in export(f"--alpha {given}", lost, named)
    assert load_file(named).keys() == with_alpha(tensors).keys()
    assert same(read(named).layers, made.layers)
    assert read(named).header.get("alpha") == (None if given == "rank" else "6.0")
    export("", lost, tmp_path / "y", 2, "--format")
    for stated in (named, path, written(lost, with_alpha(tensors))):
        export(f"--alpha {given}", stated, tmp_path / "y", 2, rf"--alpha: .*{stated}")
    export(f"{flags} --alpha {given}", named, tmp_path / "y", 2, "--alpha: ")
    kronecker = {"transformer.proj_in.lokr_w1": torch.ones(2, 3)}
    export(
        f"--alpha {given}",
        written(lost, kronecker),
        tmp_path / "y",
        2,
        "--alpha: .*LoKr",
    )


def test_a_component_that_a_file_does_not_state_can_be_given(
    tmp_path: Path, export: Callable[..., str]
) -> None:
    """It is written into the header, so that the file is no longer ambiguous."""
    bare = written(tmp_path / "bare.safetensors", with_alpha(as_trained()))
    path = tmp_path / "x.safetensors"
    flags = "--format comfyui --model fused --component"
    for component in TWO:
        made = tmp_path / f"{component}.safetensors"
        export(f"{flags} {component}", bare, made)
        lora = read(made, **TWO)
        assert (lora.component, len(lora.layers)) == (component, 12)
        # An expert is the one its header names.
        export("--format kohya --overwrite", made, path)
        assert read(path, **TWO).component == component
    export(f"{flags} dit", made, tmp_path / "y", 3, "dit2")
    export(f"{flags} dit3", bare, tmp_path / "y", 2, "--component: .*'dit3'.*'dit'")
    flags = "--model fused --component dit2"
    export(f"{flags} --alpha rank", bare, tmp_path / "y", 2, "--format")
    weights = written(tmp_path / "w.safetensors", {"a": torch.ones(1)})
    for flags in ("--component dit2", "--alpha rank"):
        target = tmp_path / "y"
        export(
            f"--format kohya --model fused {flags}",
            weights,
            target,
            2,
            f"{flags[:6]}.*: .*{weights}",
        )
    assert not target.exists()


def test_options_after_the_files_name_are_read_as_elsewhere(
    tmp_path: Path, export: Callable[..., str]
) -> None:
    tensors = as_trained()
    unknown = "transformer.blocks.0.attn.k_img.lora_{}.weight"
    tensors |= {
        unknown.format("A"): torch.ones(4, 6),
        unknown.format("B"): torch.ones(6, 4),
    }
    file, path = (
        written(tmp_path / "x.safetensors", tensors),
        tmp_path / "y.safetensors",
    )
    flags = "--format kohya --model fused"
    export(flags, f"{file}@alpha=rank", path, 3, "1 of its 13 ")
    named = f"{file}@alpha=rank@skip_missing"
    export(flags, named, path)
    assert len(read(path).layers) == 12
    export(f"{flags} --overwrite --alpha rank", named, path, 2, "--alpha: ")
    export(f"{flags} --overwrite", f"{file}:0.5", path, 2, r"INPUT: .*0\.5")
    export("--alpha rank", f"{file}@skip_missing", tmp_path / "z", 2, "--format")


def test_what_no_file_of_a_program_can_hold_is_not_written(
    tmp_path: Path, export: Callable[..., str]
) -> None:
    file, path = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    first = "transformer.blocks.0.attn.to_{}."
    kronecker = {"lokr_w1": torch.ones(2, 3), "lokr_w2": torch.ones(3, 2)}
    lokr = {first.format("q") + name: one for name, one in kronecker.items()}
    pair = {"lora_A.weight": torch.ones(2, 6), "lora_B.weight": torch.ones(6, 2)}
    lora = {first.format("k") + name: one for name, one in pair.items()}
    dora = with_alpha(lora) | {first.format("k") + "dora_scale": torch.ones(6)}
    oft = {first.format("q") + "oft_R.weight": torch.ones(3, 1)}
    oft |= {first.format("q") + "alpha": torch.tensor(2.0)}
    encoder = {
        f"text_encoder.layers.0.q_proj.{name}": one for name, one in pair.items()
    }
    for tensors, flags, code, words in (
        (
            {first.format("q") + "diff": torch.ones(6, 6)},
            "diffusers",
            3,
            r"to_q\.weight",
        ),
        ({**lokr, **with_alpha(lora)}, "diffusers", 3, "lora and lokr"),
        (lokr, "comfyui", 2, "--format: .*to_q"),
        (dora, "comfyui", 2, "--format: .*to_k"),
        (dora, "diffsynth", 2, "--format: diffsynth .*dora"),
        (oft, "comfyui", 2, "--format: comfyui .*oft(?s:.*)  give diffusers$"),
        (oft, "kohya", 2, "--format: kohya .*oft"),
        (with_alpha(encoder), "comfyui", 2, "--format: comfyui .*text_encoder"),
        (with_alpha(encoder), "kohya --model unbuilt", 2, "component text_encoder"),
    ):
        flags = flags if "--model" in flags else f"{flags} --model fused"
        export(f"--format {flags}", written(file, tensors), path, code, words)
    assert not path.exists()
    # The network of a component of which the file has no layers need not be built.
    export("--format kohya --model unbuilt", written(file, with_alpha(lora)), path)


def test_what_is_there_is_left_as_it_is(
    tmp_path: Path, export: Callable[..., str]
) -> None:
    path, _ = ours(tmp_path, **CONFIG)
    there, dangling = tmp_path / "there.safetensors", tmp_path / "dangling"
    there.write_text("mine")
    dangling.symlink_to(tmp_path / "elsewhere" / "file.safetensors")
    for target in (there, dangling):
        export(
            "--format kohya", path, target, 2, f"OUTPUT: {target} (?s:.*)--overwrite"
        )
    tensors = {"transformer.x.lora_A.weight": torch.ones(1)}
    broken = written(tmp_path / "broken.safetensors", tensors, {"family": "fused"})
    export("--format kohya --overwrite", broken, there, 3, str(broken))
    assert there.read_text() == "mine" and dangling.is_symlink()
    export("--format kohya --overwrite", path, there)
    assert "lora_unet_double_0_proj.alpha" in load_file(there)
    for folder in (tmp_path, f"{tmp_path}/new/"):
        export("--format kohya --overwrite", path, folder, 2, f"{folder} is a folder")
    assert not (tmp_path / "new").exists()
    export("--format kohya", tmp_path / "nowhere", tmp_path / "y", 3, "nowhere: ")
    export("--format kohya", tmp_path, tmp_path / "y", 2, f"INPUT: .* {broken}")
    export("--format kohya", path, tmp_path / "new/folder/z")


def test_the_weights_of_a_component_get_the_original_names_and_back(
    tmp_path: Path, export: Callable[..., str]
) -> None:
    state = network().state_dict()
    header = {"family": "fused", **CONFIG}
    full = written(tmp_path / "full.safetensors", state, header)
    there, back = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    assert re.search(r" 26 .* dit, .* 18 ", export("--format comfyui", full, there))
    found, kept = read_tensors(there)
    k = state["blocks.1.attn.to_k.weight"]
    assert torch.equal(found["double.1.qkv.weight"][6:12], k)
    assert torch.equal(found["final.mod.bias"], state["norm_out.linear.bias"].roll(6))
    assert kept["config"] == CONFIG["config"]
    files = Files((there,), checkpoint_format=ORIGINAL)
    loaded = DIT.load(files, DIT.configure({"width": 6}), torch.float32)
    assert torch.equal(output(loaded), output(network()))
    prefixed = {f"model.diffusion_model.{key}": one for key, one in found.items()}
    for source in (there, written(full, prefixed, header)):
        export("--format diffusers --overwrite", source, back)
        again = load_file(back)
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], value) for name, value in state.items())
    export("--format kohya", full, tmp_path / "z", 2, "--format: kohya ")
    more = {"layers.0.q_proj.weight": torch.ones(6, 6)}
    encoder = written(tmp_path / "encoder", more, header)
    said = export("--format diffsynth", encoder, tmp_path / "same.safetensors")
    assert "in diffusers' names" in said
    both = written(full, state | more, header)
    export("--format comfyui", both, tmp_path / "z", 3, str(both))
