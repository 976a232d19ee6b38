"""`dstrain export`: a LoRA or a checkpoint in another program's names, whole or not at
all, and back again.
"""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dstrain.lora.export
import pytest
import torch
from dstrain import LoraConfig, StateError, SystemFault, UsageError
from dstrain.cli.main import main
from dstrain.config import LoraFile, parse_alpha
from dstrain.lora import read_lora
from dstrain.lora.export import export
from dstrain.models.configs import ConfigQuery, find_config
from dstrain.plugin import Files, ModelFamily
from dstrain.storage import CHECKSUM, read_tensors, verify_file
from safetensors.torch import load_file, save_file

from tests.support.family import weights_of
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
from tests.support.runs import project, train

CONFIG = {"component": "dit", "config": json.dumps({"width": 6})}
PROGRAMS = ("diffusers", "comfyui", "kohya", "diffsynth")


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dstrain.lora.export.load_family

    def load(name: str, disabled_plugins: Collection[str] = ()) -> ModelFamily:
        return MODEL if name == "fused" else known(name, disabled_plugins)

    monkeypatch.setattr(dstrain.lora.export, "load_family", load)


@pytest.mark.parametrize("first", PROGRAMS)
@pytest.mark.parametrize("second", PROGRAMS)
def test_from_any_program_to_any_other_and_back(
    first: str, second: str, tmp_path: Path
) -> None:
    path, _ = ours(tmp_path, **CONFIG)
    for number, program in enumerate((first, second, "diffusers")):
        path, before = tmp_path / f"{number}.safetensors", path
        export(before, path, program)
    original = read(tmp_path / "ours.safetensors")
    assert same(read(path).layers, original.layers)
    assert read_tensors(path)[1].keys() == original.header.keys()
    assert json.loads(original.header["lora_adapter_metadata"]) == json.loads(
        read_tensors(path)[1]["lora_adapter_metadata"]
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_alpha_of_another_file_becomes_part_of_b_and_is_kept_in_the_header(
    program: str, tmp_path: Path
) -> None:
    older = written(
        tmp_path / "older.safetensors",
        as_trained(),
        {"family": "fused", "alpha": "6.0", **CONFIG, **adapter()},
    )
    export(older, tmp_path / "x.safetensors", program)
    made = read(tmp_path / "x.safetensors")
    before = read(older).layers
    assert {layer.scale for layer in made.layers.values()} == {1.0}
    assert same(made.layers, read(ours(tmp_path)[0]).layers)
    assert made.header["alpha"] == "6.0"
    for name, layer in made.trained_layers(older).items():
        assert layer.alpha == 6.0
        assert torch.allclose(layer.up, before[name].up, rtol=1.2e-7, atol=0)


def test_the_header_is_kept_and_checksummed_again(tmp_path: Path) -> None:
    path, _ = ours(tmp_path, **CONFIG, step="7")
    words = export(path, tmp_path / "x.safetensors", "comfyui")
    assert (
        words
        == "LoRA on 12 layers of dit, in comfyui's names, 24 keys; the first is diffusion_model.double.0.proj.alpha"
    )
    header = verify_file(tmp_path / "x.safetensors")
    before = read_tensors(path)[1]
    assert "lora_adapter_metadata" not in header
    assert {k: v for k, v in header.items() if k != CHECKSUM} == {
        k: v for k, v in before.items() if k not in (CHECKSUM, "lora_adapter_metadata")
    }


def test_a_file_without_a_header_needs_the_family_and_a_published_configuration(
    tmp_path: Path,
) -> None:
    bare = written(
        tmp_path / "bare.safetensors", with_alpha(load_file(ours(tmp_path)[0]))
    )
    with pytest.raises(
        UsageError,
        match=r"--model: is required: the header of .*bare\.safetensors names no family",
    ):
        export(bare, tmp_path / "x.safetensors", "kohya")
    export(bare, tmp_path / "x.safetensors", "kohya", "fused")
    wanted = {name: layer.folded() for name, layer in read(bare).layers.items()}
    assert same(read(tmp_path / "x.safetensors").layers, wanted)


@pytest.mark.parametrize(("override", "ratio"), [("rank", 1.0), (6.0, 1.5)])
def test_an_alpha_that_a_file_does_not_state_can_be_given(
    override: Any, ratio: float, tmp_path: Path
) -> None:
    path, _ = ours(tmp_path)
    lost = written(tmp_path / "lost.safetensors", load_file(path))
    with pytest.raises(
        StateError,
        match=rf"rank and alpha are unknown(.|\n)*dstrain export --alpha rank {lost} ",
    ):
        export(lost, tmp_path / "x.safetensors", "diffusers", "fused")
    export(lost, tmp_path / "x.safetensors", "diffusers", "fused", alpha=override)
    made = read(tmp_path / "x.safetensors")
    before = read(path).layers
    assert {layer.scale for layer in made.layers.values()} == {1.0}
    assert float(made.header["alpha"]) == 4 * ratio
    assert made.layers.keys() == before.keys()
    assert all(
        torch.equal(layer.up, before[name].up * ratio)
        for name, layer in made.layers.items()
    )
    export(lost, tmp_path / "named.safetensors", None, alpha=override)
    kept = read(tmp_path / "named.safetensors").layers
    assert same(kept, made.layers)
    with pytest.raises(
        UsageError, match=r"--alpha: has no effect: .* states its own alpha"
    ):
        export(tmp_path / "named.safetensors", tmp_path / "y", None, alpha=override)
    with pytest.raises(UsageError, match="--format: is required"):
        export(tmp_path / "named.safetensors", tmp_path / "y", None)
    with pytest.raises(
        UsageError, match=r"--alpha: has no effect: .* states its own alpha"
    ):
        export(path, tmp_path / "y.safetensors", "diffusers", "fused", alpha=override)
    with pytest.raises(
        UsageError, match=r"--alpha: has no effect: .* is not a LoRA file"
    ):
        export(written(tmp_path / "w.safetensors", {"a": torch.ones(1)}), tmp_path / "y", "diffusers", "fused",
               alpha=override)  # fmt: skip


def test_a_component_that_a_file_does_not_state_can_be_given(tmp_path: Path) -> None:
    """It is written into the header, so that the file is no longer ambiguous."""
    two = {"dit": SHAPES, "dit2": SHAPES}
    bare = written(tmp_path / "bare.safetensors", with_alpha(as_trained()))
    with pytest.raises(StateError, match="is ambiguous"):
        read(bare, **two)
    for component in two:
        made = tmp_path / f"{component}.safetensors"
        export(bare, made, "comfyui", "fused", component=component)
        lora = read(made, **two)
        assert lora.component == component
        assert len(lora.layers) == len(read(bare).layers)
    output = tmp_path / "x.safetensors"
    with pytest.raises(StateError, match="is a LoRA for dit2, not for dit"):
        export(made, output, "comfyui", "fused", component="dit")
    with pytest.raises(UsageError, match=r"no LoRA on 'dit3'; did you mean 'dit'"):
        export(bare, output, "comfyui", "fused", component="dit3")
    with pytest.raises(UsageError, match="--format: is required"):
        export(bare, output, None, "fused", component="dit2", alpha="rank")
    weights = written(tmp_path / "w.safetensors", {"a": torch.ones(1)})
    with pytest.raises(UsageError, match=r"--component: has no effect: .* not a LoRA"):
        export(weights, output, "diffusers", "fused", component="dit2")


def test_options_after_the_files_name_are_read_as_elsewhere(tmp_path: Path) -> None:
    tensors = as_trained()
    for matrix in "AB":
        key = f"transformer.blocks.0.attn.k_img.lora_{matrix}.weight"
        tensors[key] = torch.ones(4, 6) if matrix == "A" else torch.ones(6, 4)
    file = written(tmp_path / "x.safetensors", tensors)
    output = tmp_path / "y.safetensors"
    with pytest.raises(StateError, match="1 of its 13 layers match no naming"):
        export(Path(f"{file}@alpha=rank"), output, "kohya", "fused")
    named = Path(f"{file}@alpha=rank@skip_missing")
    export(named, output, "kohya", "fused")
    assert len(read(output).layers) == 12
    with pytest.raises(UsageError, match="--alpha: is given twice"):
        export(named, output, "kohya", "fused", overwrite=True, alpha="rank")
    with pytest.raises(UsageError, match=r"INPUT: has no scale, but .* has 0\.5"):
        export(Path(f"{file}:0.5"), output, "kohya", "fused", overwrite=True)


def test_what_can_only_be_merged_is_not_written(tmp_path: Path) -> None:
    tensors = {"diffusion_model.img_in.diff": torch.ones(6, 3)}
    file = written(tmp_path / "x.safetensors", tensors)
    with pytest.raises(
        StateError, match=r"contains differences of whole weights, which export cannot"
    ):
        export(file, tmp_path / "y.safetensors", "diffusers", "fused")


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "ranks"])
def test_an_alpha_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--alpha: expected a number above 0, or rank"):
        parse_alpha(text)


def test_networks_are_built_only_where_a_file_has_layers_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    shapes = dstrain.lora.export._shapes
    monkeypatch.setattr(
        dstrain.lora.export,
        "_shapes",
        lambda c, content: built.append(c.name) or shapes(c, content),
    )
    export(ours(tmp_path, **CONFIG)[0], tmp_path / "x.safetensors", "comfyui")
    assert built == ["dit"]


def test_a_component_whose_network_cannot_be_built_says_how_it_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [
        replace(
            component,
            network=SimpleNamespace(load=DIT.load, configure=DIT.configure),
        )
        for component in COMPONENTS
    ]
    path = ours(tmp_path, **CONFIG)[0]
    monkeypatch.setattr(
        "tests.support.lora_family.COMPONENTS", (*plain[:2], COMPONENTS[2])
    )
    with pytest.raises(
        UsageError,
        match=r"component dit: the shapes of dit are unknown: .*\n  give its network a method build",
    ):
        export(path, tmp_path / "x.safetensors", "kohya")
    monkeypatch.setattr(
        "tests.support.lora_family.COMPONENTS",
        [replace(component, network=DIT) for component in plain],
    )
    export(path, tmp_path / "x.safetensors", "kohya")
    assert same(read(tmp_path / "x.safetensors").layers, read(path).layers)


def test_our_file_in_the_references_names_needs_no_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(ours(tmp_path, **CONFIG)[0], tmp_path / "x.safetensors", "diffsynth")
    lora = read(tmp_path / "x.safetensors")
    assert capsys.readouterr().err == ""
    assert lora.header["alpha"] == "6.0"


def test_an_expert_is_the_one_its_header_names(tmp_path: Path) -> None:
    path, _ = ours(tmp_path)
    tensors, header = (
        load_file(path),
        {"family": "fused", "component": "dit2", "config": CONFIG["config"]},
    )
    export(
        written(tmp_path / "two.safetensors", with_alpha(tensors), header),
        tmp_path / "x.safetensors",
        "comfyui",
    )
    (lora,) = read_lora(
        LoraFile(tmp_path / "x.safetensors"), MODEL, {"dit": SHAPES, "dit2": SHAPES}
    )
    assert lora.component == "dit2"


def test_a_program_without_names_for_a_component_is_refused(tmp_path: Path) -> None:
    tensors = {"text_encoder.layers.0.q_proj.lora_A.weight": torch.ones(1, 6),
               "text_encoder.layers.0.q_proj.lora_B.weight": torch.ones(6, 1)}  # fmt: skip
    path = written(tmp_path / "e.safetensors", with_alpha(tensors), {"family": "fused"})
    with pytest.raises(
        UsageError, match="--format: comfyui has no key names for LoRA on text_encoder"
    ):
        export(path, tmp_path / "x.safetensors", "comfyui")
    assert not (tmp_path / "x.safetensors").exists()


def test_what_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    path, _ = ours(tmp_path, **CONFIG)
    there = tmp_path / "there.safetensors"
    there.write_text("mine")
    with pytest.raises(
        UsageError, match=r"already exists and was not modified\n  give --overwrite"
    ):
        export(path, there, "kohya")
    assert there.read_text() == "mine"
    broken = written(
        tmp_path / "broken.safetensors",
        {"transformer.x.lora_A.weight": torch.ones(1)},
        {"family": "fused"},
    )
    with pytest.raises(StateError):
        export(broken, there, "kohya", overwrite=True)
    assert there.read_text() == "mine"
    export(path, there, "kohya", overwrite=True)
    assert "lora_unet_double_0_proj.alpha" in load_file(there)
    dangling = tmp_path / "dangling.safetensors"
    dangling.symlink_to(tmp_path / "elsewhere" / "file.safetensors")
    with pytest.raises(UsageError, match="already exists"):
        export(path, dangling, "kohya")
    assert dangling.is_symlink()
    with pytest.raises(SystemFault):
        export(path, tmp_path, "kohya", overwrite=True)
    with pytest.raises(StateError, match="nowhere: does not exist"):
        export(tmp_path / "nowhere", there, "kohya")


def test_a_file_can_be_converted_in_place(tmp_path: Path) -> None:
    path, _ = ours(tmp_path, **CONFIG)
    before = read(path).layers
    export(path, path, "kohya", overwrite=True)
    assert "lora_unet_double_0_proj.alpha" in load_file(path)
    assert same(read(path).layers, before)


def test_the_weights_of_a_component_get_the_original_names_and_back(
    tmp_path: Path,
) -> None:
    state = network().state_dict()
    save_file(state, tmp_path / "full.safetensors", {"family": "fused", **CONFIG})
    words = export(tmp_path / "full.safetensors", tmp_path / "x.safetensors", "comfyui")
    assert words.startswith("26 weights of dit, in comfyui's names, 18 keys")
    there = load_file(tmp_path / "x.safetensors")
    assert torch.equal(
        there["double.1.qkv.weight"][6:12], state["blocks.1.attn.to_k.weight"]
    )
    assert torch.equal(there["final.mod.bias"], state["norm_out.linear.bias"].roll(6))
    assert read_tensors(tmp_path / "x.safetensors")[1]["config"] == CONFIG["config"]
    files = Files((tmp_path / "x.safetensors",), checkpoint_format=ORIGINAL)
    loaded = DIT.load(files, DIT.configure({"width": 6}), torch.float32)
    assert torch.equal(output(loaded), output(network()))
    export(tmp_path / "x.safetensors", tmp_path / "y.safetensors", "diffusers")
    again = load_file(tmp_path / "y.safetensors")
    assert again.keys() == state.keys()
    assert find_config(ConfigQuery(COMPONENTS[0], files)) == {"width": 6}
    assert all(torch.equal(again[name], value) for name, value in state.items())
    with pytest.raises(UsageError, match="kohya is a format for LoRA files"):
        export(tmp_path / "full.safetensors", tmp_path / "z.safetensors", "kohya")


@pytest.mark.usefixtures("tiny")
def test_an_exported_file_gives_the_same_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = project(tmp_path)
    lora = (
        train(here, max_steps=2, learning_rate=0.1, lora_alpha=3.0)
        / "step-2.safetensors"
    )
    models = json.dumps(list(weights_of(here / "model").values()))

    def image(*loras: Path) -> bytes:
        given = [word for path in loras for word in ("--lora", str(path))]
        name = str(tmp_path / f"{len(list(tmp_path.iterdir()))}.bmp")
        words = [
            "generate",
            "--model",
            "tiny",
            "--model_paths",
            models,
            "--prompt",
            "dog",
            *given,
            "--output",
            name,
        ]
        assert main(words) == 0
        return Path(name).read_bytes()

    wanted = image(lora)
    assert wanted != image()
    for program in PROGRAMS:
        out = tmp_path / f"{program}.safetensors"
        capsys.readouterr()
        assert main(["export", "--format", program, str(lora), str(out)]) == 0
        assert capsys.readouterr().out.startswith(
            f"wrote {out}: LoRA on 4 layers of dit, in {program}'s names, "
        )
        assert image(out) == wanted
    assert main(["export", "--format", "kohya", str(lora), str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (
        main(
            [
                "generate",
                "--model",
                "tiny",
                "--toy",
                "--prompt",
                "x",
                "--output",
                "x.png",
                "--lora",
                f"{lora}:abc",
            ]
        )
        == 3
    )
    assert ":abc: no such LoRA file" in capsys.readouterr().err


def test_the_toy_of_diffusers_loader_acts_the_same(tmp_path: Path) -> None:
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.loaders import PeftAdapterMixin
    from diffusers.models.modeling_utils import ModelMixin

    from tests.support.lora_family import Net

    class Toy(ModelMixin, ConfigMixin, PeftAdapterMixin):
        @register_to_config
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.net = Net(width)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

    path, module = ours(tmp_path, LoraConfig("dit", SPEC.targets, 4, 6.0), **CONFIG)
    export(path, tmp_path / "kohya.safetensors", "kohya")
    export(tmp_path / "kohya.safetensors", tmp_path / "back.safetensors", "diffusers")
    for file in (path, tmp_path / "back.safetensors"):
        tensors, header = read_tensors(file)
        named = {
            key.replace("transformer.", "transformer.net."): value
            for key, value in tensors.items()
        }
        toy = Toy()
        toy.net.load_state_dict(network().state_dict())
        metadata = json.loads(header["lora_adapter_metadata"])
        toy.load_lora_adapter(named, prefix="transformer", metadata=metadata)
        assert torch.allclose(output(toy), output(module), atol=1e-6)
