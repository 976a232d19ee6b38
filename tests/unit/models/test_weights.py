"""Weights are found in files by their names, in any arrangement, and nothing in a file
is ever run.
"""

import json
import os
import pathlib
import pickle
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.models import NATIVE, recognize
from dstrain.models.weights import Weights, find_weights
from dstrain.plugin import CheckpointFormat, Component, Files, KeyMap
from safetensors.torch import save_file
from torch import Tensor

LAYOUT = CheckpointFormat(
    key_patterns=("blocks.*.qkv.weight",),
    rows=(
        KeyMap("layers.*.mix.*.q", "blocks.*.*.qkv", 0, 1, 3),
        KeyMap("layers.*.mix.*.k", "blocks.*.*.qkv", 1, 2, 3),
        KeyMap("layers.*.mix.*.v", "blocks.*.*.qkv", 2, 3, 3),
        KeyMap("layers.*.rest", "blocks.*"),
        KeyMap("", "model"),
        KeyMap("scale", "last.gain"),
    ),
    ignored=("log.*",),
)


def component(name: str, *key_patterns: str, **fields: Any) -> Component:
    return Component(name, SimpleNamespace(), name, key_patterns, **fields)


def written(path: Path, *names: str) -> Files:
    weights = {name: torch.zeros(1) for name in names}
    torch.save(weights, path) if path.suffix == ".pth" else save_file(weights, path)
    return Files((path,))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_are_read_in_pieces_in_the_dtype_asked_for(
    suffix: str, tmp_path: Path
) -> None:
    whole = torch.arange(12.0).reshape(6, 2).half()
    state = {
        "net.blocks.0.0.qkv.weight": whole,
        "net.ids": torch.tensor([1, 2]),
        "net.model.w": whole.t(),
    }
    path = tmp_path / f"x.{suffix}"
    torch.save(state, path) if suffix == "pth" else save_file(
        {n: w.contiguous() for n, w in state.items()}, path
    )
    weights = Weights.of(Files((path,), prefix="net.", checkpoint_format=LAYOUT))
    assert weights.shapes["layers.0.mix.0.k.weight"] == (2, 2)
    wanted: dict[str, tuple[int, ...]] = {
        "layers.0.mix.0.k.weight": (2, 2, 1),
        "ids": (2,),
        "w": (2, 6),
    }
    read = dict(weights.read(wanted, torch.float32))
    before = {name: weight.clone() for name, weight in read.items()}
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(read["layers.0.mix.0.k.weight"], whole[2:4, :, None].float())
    assert torch.equal(read["ids"], torch.tensor([1, 2]))
    assert torch.equal(read["w"], whole.t().float())
    assert all(
        torch.equal(read[name], before[name]) and read[name].is_contiguous()
        for name in read
    )


def test_a_weight_may_be_joined_from_several_files(tmp_path: Path) -> None:
    save_file({"first": torch.zeros(1, 2)}, tmp_path / "1.safetensors")
    torch.save({"second": torch.ones(2, 2)}, tmp_path / "2.pth")
    paths = (tmp_path / "1.safetensors", tmp_path / "2.pth")
    weights = Weights.of(
        Files(
            paths,
            checkpoint_format=CheckpointFormat(
                (), (KeyMap("w", "second"), KeyMap("w", "first"))
            ),
        )
    )
    assert weights.shapes == {"w": (3, 2)}
    assert torch.equal(
        dict(weights.read({"w": (3, 2)}, torch.float32))["w"],
        torch.tensor([[1.0, 1], [1, 1], [0, 0]]),
    )
    save_file({"first": torch.zeros(1, 3)}, paths[0])
    with pytest.raises(
        StateError, match="second, first: parts of one weight differ in shape"
    ):
        _ = Weights.of(
            Files(
                paths,
                checkpoint_format=CheckpointFormat(
                    (), (KeyMap("w", "second"), KeyMap("w", "first"))
                ),
            )
        ).shapes


def test_headers_tell_where_each_tensor_lies(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    torch.save({"b": torch.zeros(4)}, tmp_path / "2.pth")
    places = find_weights([tmp_path / "1.safetensors", tmp_path / "2.pth"])
    assert places == {
        "a": (tmp_path / "1.safetensors", "a", (2, 3)),
        "b": (tmp_path / "2.pth", "b", (4,)),
    }


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_damaged_or_absent_file_is_named(suffix: str, tmp_path: Path) -> None:
    torn = tmp_path / f"torn.{suffix}"
    written(torn, "a", "b")
    torn.write_bytes(torn.read_bytes()[:-9])
    for name in (torn.name, f"absent.{suffix}"):
        with pytest.raises(StateError, match=f"{name}: cannot be read as "):
            find_weights([tmp_path / name])


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [
        *written(tmp_path / "1.safetensors", "a").paths,
        *written(tmp_path / "2.pth", "b", "a").paths,
    ]
    with pytest.raises(
        StateError,
        match=r"2.pth: 'a' is also in 1.safetensors; give the files of one model only",
    ):
        find_weights(paths)


class Runs:
    """Unpickling this calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Restored:
    """Unpickling this runs its __setstate__."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Path]) -> None:
        state["path"].touch()


PAYLOADS: dict[str, Callable[[Path], Any]] = {
    "system": lambda mark: Runs(os.system, f"touch {mark}"),
    "eval": lambda mark: Runs(
        eval, f"__import__('pathlib').Path({str(mark)!r}).touch()"
    ),
    "method": lambda mark: Runs(pathlib.Path.touch, mark),
    "runpy": lambda mark: Runs(runpy.run_path, str(mark.with_name("script.py"))),
    "setstate": lambda mark: Restored(mark),
    "getattr": lambda mark: Runs(getattr, Runs(__import__, "os"), "getcwd"),
}


@pytest.mark.parametrize("beside", [True, False], ids=["beside weights", "alone"])
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_file_with_code_is_refused_by_name_and_not_run(
    name: str, beside: bool, tmp_path: Path
) -> None:
    mark, path = tmp_path / "it ran", tmp_path / "model.pth"
    (tmp_path / "script.py").write_text(
        f"import pathlib; pathlib.Path({str(mark)!r}).touch()"
    )
    payload = PAYLOADS[name](mark)
    torch.save({"weight": torch.zeros(1), "more": payload} if beside else payload, path)
    with pytest.raises(
        StateError, match=r"model\.pth: contains more than weights: \w+"
    ) as error:
        find_weights([path])
    assert "save it as safetensors" in str(error.value)
    assert not mark.exists()
    with pytest.raises(StateError, match="contains more than weights"):
        Weights.of(Files((path,)))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pickle", "legacy", "script"])
def test_other_files_under_such_a_name_are_refused_and_not_run(
    name: str, tmp_path: Path
) -> None:
    mark, path = tmp_path / "it ran", tmp_path / "model.pth"
    if name == "pickle":
        path.write_bytes(pickle.dumps(PAYLOADS["method"](mark)))
    elif name == "legacy":
        torch.save(
            {"weight": torch.zeros(1)}, path, _use_new_zipfile_serialization=False
        )
    else:
        written(path.with_suffix(".safetensors"), "weight").paths[0].rename(path)
    with pytest.raises(StateError, match=r"model\.pth: cannot be read as weights: .*"):
        find_weights([path])
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(1)],
        {"state_dict": {"weight": torch.zeros(1), "step": 3}},
        {"state_dict": {1: torch.zeros(1)}},
        {1: torch.zeros(1)},
        {"weight": 1.0},
        torch.zeros(1),
    ],
    ids=["list", "nested", "nested number", "number", "float", "tensor"],
)
def test_a_file_that_is_no_state_dict_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model.pth")
    with pytest.raises(StateError, match=r"model\.pth: is not a state dict of tensors"):
        find_weights([tmp_path / "model.pth"])


def test_dictionaries_in_a_file_are_parts_of_names(tmp_path: Path) -> None:
    parts = {"adapter": {"0.k.weight": torch.ones(2)}, "norm": torch.zeros(3)}
    torch.save(parts, tmp_path / "model.bin")
    weights = Weights.of(Files((tmp_path / "model.bin",)))
    assert weights.shapes == {"adapter.0.k.weight": (2,), "norm": (3,)}
    read = dict(weights.read({"adapter.0.k.weight": (2,)}, torch.float32))
    assert torch.equal(read["adapter.0.k.weight"], torch.ones(2))


def test_reading_a_torch_file_does_not_copy_what_is_not_asked_for(
    tmp_path: Path,
) -> None:
    weights: dict[str, Tensor] = {"large": torch.zeros(1 << 20), "small": torch.ones(2)}
    torch.save(weights, tmp_path / "model.pth")
    weights_there = Weights.of(Files((tmp_path / "model.pth",)))
    read = dict(weights_there.read({"small": (2,)}, torch.float32))
    assert read["small"].untyped_storage().nbytes() == 8


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


def test_a_prefix_is_found_even_where_marks_would_match_with_it(tmp_path: Path) -> None:
    files = written(tmp_path / "x.safetensors", "vae.encoder.gain", "vae.x")
    assert found(files, component("any", "*gain", prefixes=("vae.", "other."))) == [
        (["any"], "vae.", NATIVE)
    ]


def test_one_file_may_hold_several_components(tmp_path: Path) -> None:
    names = (
        "model.diffusion_model.blocks.0.0.qkv.weight",
        "vae.encoder.a",
        "vae.decoder.a",
    )
    files = written(tmp_path / "all.safetensors", *names)
    assert found(files, DIT, VAE) == [
        (["dit"], "model.diffusion_model.", LAYOUT),
        (["vae"], "vae.", NATIVE),
    ]
    files = written(tmp_path / "more.safetensors", *names, "surplus.weight")
    with pytest.raises(
        StateError, match=r"1 of its names belong to none of dit, vae: surplus.weight"
    ):
        recognize(files, (DIT, VAE))


def test_experts_are_found_together(tmp_path: Path) -> None:
    expert = component(
        "dit2", "proj.weight", formats=DIT.formats, prefixes=DIT.prefixes
    )
    files = written(tmp_path / "x.safetensors", "proj.weight")
    assert found(files, DIT, VAE, expert) == [(["dit", "dit2"], "", NATIVE)]
    with pytest.raises(
        StateError,
        match=r"matches dit, dit3 equally well; its first names: proj.weight",
    ):
        recognize(files, (DIT, component("dit3", "proj.*")))
    with pytest.raises(
        StateError, match=r"matches none of vae; its first names: proj.weight"
    ):
        recognize(files, (VAE, TOKENS))


def test_components_that_ignore_each_others_keys_share_files(tmp_path: Path) -> None:
    denoiser = CheckpointFormat(("proj.weight",), ignored=("beside.*",))
    beside = CheckpointFormat(("beside.weight",), ignored=("proj.*",))
    both = (
        component("dit", "proj.weight", formats=(denoiser,)),
        component("adapter", "beside.weight", formats=(beside,)),
    )
    files = written(tmp_path / "x.safetensors", "proj.weight", "beside.weight")
    assert found(files, *both) == [(["dit"], "", denoiser), (["adapter"], "", beside)]
    greedy = component("adapter", "beside.weight")
    with pytest.raises(StateError, match="matches dit, adapter equally well"):
        recognize(files, (both[0], greedy))


def test_files_that_are_no_model_by_themselves_are_named(tmp_path: Path) -> None:
    lora = written(tmp_path / "lora.safetensors", "proj.lora_A.weight")
    with pytest.raises(StateError, match="matches none of dit") as caught:
        recognize(lora, (DIT,))
    assert caught.value.help_lines[0].startswith("it is a LoRA, not a model")
    shard = written(tmp_path / "model-00002-of-00002.safetensors", "part.weight")
    with pytest.raises(StateError, match="matches none of dit") as caught:
        recognize(shard, (DIT,))
    first, second = caught.value.help_lines
    assert first.startswith("it is one of the 2 files of a model")
    every = [str(tmp_path / f"model-0000{one}-of-00002.safetensors") for one in (1, 2)]
    assert second.endswith(json.dumps(every))
