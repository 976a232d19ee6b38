"""What a run promises, it promises for LoRA of every type: the split, resuming, starting
from a file, and a file that acts as what was trained.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import SampleKey, StateError, UsageError, run
from dstrain.cli.main import main
from dstrain.config import LoraFile
from dstrain.lora import base_shapes, merge_layers, read_lora
from dstrain.lora.export import export
from dstrain.runs.checkpoints.state import load_state, states
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.support.family import MODEL
from tests.support.runs import (
    PowerCut,
    config,
    files,
    opened,
    outcome,
    same,
    stop_at,
    train,
    training_run,
    warm_project,
)

pytestmark = pytest.mark.usefixtures("tiny")

TYPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ranks": {"lora_rank": "3,to_out=2", "lora_alpha": "blocks.1=4"},
        "dropout": {"lora_dropout": 0.3},
        "dora": {"lora_type": "dora", "lora_alpha": 3.0},
        "dora of ranks with dropout": {
            "lora_type": "dora",
            "lora_rank": "3,to_out=2",
            "lora_dropout": 0.3,
        },
        "lokr": {"lora_type": "lokr", "lora_rank": 1, "lora_alpha": 2.0},
        "lokr of factor 4": {
            "lora_type": "lokr",
            "lokr_factor": 4,
            "lora_rank": "2,to_out=1",
            "lora_alpha": 3.0,
        },
        "lokr with products in some layers": {
            "lora_type": "lokr",
            "lokr_factor": 2,
            "lora_rank": "4,to_out=1",
            "lora_alpha": 3.0,
        },
    }
)
PLACES = MappingProxyType(
    {
        "dit": {},
        "text_encoder": {
            "lora_base_model": "text_encoder",
            "lora_target_modules": "layer",
        },
    }
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(params=TYPES)
def flags(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    return TYPES[request.param]


@pytest.fixture(scope="module")
def trained(here: Path) -> Callable[..., Path]:
    """Return a function from flags to what a run of three steps leaves, which is made
    once for all tests that only read it.
    """
    made: dict[str, Path] = {}

    def output(**given: Any) -> Path:
        key = repr(given)
        if key not in made:
            place = here / f"trained-{len(made)}"
            made[key] = train(here, output_path=place, max_steps=3, **given)
        return made[key]

    return output


def with_place(flags: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Flags that fit the layers of a component."""
    given = {**flags, **PLACES[place]}
    if place == "text_encoder" and "=" in str(given.get("lora_rank")):
        given |= {"lora_rank": "2,layer=3", "lora_alpha": "layer=4"}
    return given


@pytest.mark.parametrize("place", PLACES)
def test_a_run_in_two_stages_is_the_one_that_is_not_split(
    place: str, flags: Mapping[str, Any], here: Path, tmp_path: Path
) -> None:
    given = {**with_place(flags, place), "max_steps": 4, "batch_size": 2}
    train(here, output_path=tmp_path / "whole", **given)
    split = {"feature_cache": tmp_path / "cache", "output_path": tmp_path / "split"}
    run(config(here, task="sft:data_process", **split, **given))
    train(here, task="sft:train", **split, **given)
    assert same(outcome(tmp_path / "whole"), outcome(tmp_path / "split"))


def test_a_resumed_run_is_the_one_that_did_not_stop(
    flags: Mapping[str, Any], here: Path, tmp_path: Path
) -> None:
    given = {**flags, "max_steps": 4, "save_steps": 2, "ema_decay": 0.9}
    train(here, output_path=tmp_path / "whole", **given)
    with pytest.raises(PowerCut):
        train(here, stop_at(3), output_path=tmp_path / "cut", **given)
    train(here, output_path=tmp_path / "cut", resume="auto", **given)
    assert same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))


@pytest.mark.parametrize(
    "saving",
    [
        {"use_gradient_checkpointing": True},
        {"use_gradient_checkpointing_offload": True},
        {"blocks_to_swap": 2},
    ],
    ids=" ".join,
)
def test_saving_memory_changes_no_bit(
    saving: Mapping[str, Any],
    flags: Mapping[str, Any],
    here: Path,
    trained: Callable[..., Path],
    tmp_path: Path,
) -> None:
    train(here, output_path=tmp_path / "saving", max_steps=3, **flags, **saving)
    assert same(files(trained(**flags)), files(tmp_path / "saving"))


def trained_weights(output: Path) -> dict[str, Tensor]:
    """The layers as the newest state has them."""
    return load_state(states(output)[0]).trainable


@pytest.mark.parametrize("program", ["diffusers", "comfyui", "kohya"])
def test_training_goes_on_from_a_file_in_any_programs_names(
    program: str,
    flags: Mapping[str, Any],
    here: Path,
    trained: Callable[..., Path],
    tmp_path: Path,
) -> None:
    output = trained(**flags)
    file = tmp_path / "file.safetensors"
    export(output / "step-3.safetensors", file, program)
    more = {**flags, "learning_rate": 1e-30, "lora_checkpoint": file, "max_steps": 1}
    again = train(here, output_path=tmp_path / "more", **more)
    first, second = trained_weights(output), trained_weights(again)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.allclose(second[name], value, rtol=1.2e-7, atol=0), name


@pytest.mark.parametrize("program", ["diffusers", "comfyui", "kohya"])
def test_what_is_saved_acts_as_what_was_trained(
    program: str,
    flags: Mapping[str, Any],
    here: Path,
    trained: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """As layers, merged into the weights, and in another program's names."""
    given = {**flags, "learning_rate": 0.1}
    output = trained(**given)
    file = tmp_path / "file.safetensors"
    export(output / "step-3.safetensors", file, program)
    wanted = prediction(resumed(here, output, given))
    plain = opened(here / "model")
    assert not torch.allclose(prediction(plain), wanted, atol=1e-2)
    added = opened(here / "model")
    added.load_lora(file)
    assert torch.allclose(prediction(added), wanted, atol=1e-6)
    merged = opened(here / "model")
    dit = merged.components["dit"]
    (lora,) = read_lora(LoraFile(file), MODEL, {"dit": base_shapes(dit)})
    merge_layers(dit, lora.layers)
    assert torch.allclose(prediction(merged), wanted, atol=1e-5)


def test_dora_scale_is_what_rows_of_length_1_are_multiplied_with(
    here: Path, tmp_path: Path
) -> None:
    """So LyCORIS, whose name it is, computes (`apply_weight_decompose`, output axis)."""
    given = {**TYPES["dora"], "learning_rate": 0.1, "max_steps": 3}
    output = train(here, output_path=tmp_path / "out", lora_format="comfyui", **given)
    tensors = load_file(output / "step-3.safetensors")
    theirs = opened(here / "model")
    with torch.no_grad():
        for name, weight in theirs.components["dit"].named_parameters():
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            if f"{key}.dora_scale" not in tensors:
                continue
            up, down = (
                tensors[f"{key}.lora_up.weight"],
                tensors[f"{key}.lora_down.weight"],
            )
            change = up @ down * tensors[f"{key}.alpha"] / len(down)
            total = weight + change
            length = total.norm(dim=1, keepdim=True)
            weight.copy_(total * tensors[f"{key}.dora_scale"] / length)
    wanted = prediction(resumed(here, output, given))
    assert torch.allclose(prediction(theirs), wanted, atol=1e-5)


def test_dora_is_not_added_above_another_lora(here: Path, tmp_path: Path) -> None:
    """Below it may be: then both act as they were trained."""
    made = {}
    for name, flags in (("lora", {}), ("dora", TYPES["dora"])):
        given = {**flags, "learning_rate": 0.1, "max_steps": 2}
        output = train(here, output_path=tmp_path / name, **given)
        made[name] = output / "step-2.safetensors"
    pipeline = opened(here / "model")
    pipeline.load_lora(made["lora"])
    with pytest.raises(UsageError, match="4 layers with a LoRA below this DoRA"):
        pipeline.load_lora(made["dora"])
    both, merged = opened(here / "model"), opened(here / "model")
    both.load_lora(made["dora"])
    both.load_lora(made["lora"])
    dit = merged.components["dit"]
    for name in ("dora", "lora"):
        (lora,) = read_lora(LoraFile(made[name]), MODEL, {"dit": base_shapes(dit)})
        merge_layers(dit, lora.layers)
    assert torch.allclose(prediction(both), prediction(merged), atol=1e-5)


@pytest.mark.parametrize(("trained", "given"), [("dora", "lora"), ("lora", "dora")])
def test_another_type_than_that_of_the_file_is_refused(
    trained: str, given: str, here: Path, tmp_path: Path
) -> None:
    output = train(here, output_path=tmp_path / "1", lora_type=trained, max_steps=1)
    file = output / "step-1.safetensors"
    with pytest.raises(StateError, match=f"give --lora_type {trained}"):
        train(here, output_path=tmp_path / "2", lora_type=given, lora_checkpoint=file)
    with pytest.raises(
        StateError, match=f"--lora_type: saved {trained}, this run {given}"
    ):
        train(here, output_path=tmp_path / "1", lora_type=given, resume="auto")


def resumed(here: Path, output: Path, given: Mapping[str, Any]) -> Any:
    """The pipeline of a run with the weights of its newest state."""
    module = training_run(config(here, **given)).module.eval()
    parameters = module.trained.parameters
    with torch.no_grad():
        for name, value in trained_weights(output).items():
            parameters[name].copy_(value)
    return module.pipeline


@torch.no_grad()
def prediction(pipeline: Any) -> Tensor:
    """What a denoiser makes of the same noise."""
    draw = torch.Generator().manual_seed(5)
    dit = pipeline.components["dit"].eval()
    noise = torch.randn(1, 4, 2, 3, generator=draw)
    text = torch.randn(1, 5, 8, generator=draw)
    mask = torch.ones(1, 5, dtype=torch.bool)
    found: Tensor = dit(noise, torch.tensor([300.0]), text, mask)
    return found


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.5])
def test_strength_scales_the_change_of_the_weights(
    strength: float,
    flags: Mapping[str, Any],
    here: Path,
    trained: Callable[..., Path],
) -> None:
    """As ComfyUI has it: what DoRA changes in the lengths, too."""
    file = trained(**flags, learning_rate=0.1) / "step-3.safetensors"
    added = opened(here / "model")
    added.load_lora(file, strength)
    merged = opened(here / "model")
    dit = merged.components["dit"]
    before = {name: weight.clone() for name, weight in dit.state_dict().items()}
    (lora,) = read_lora(LoraFile(file), MODEL, {"dit": base_shapes(dit)})
    merge_layers(dit, lora.layers)
    with torch.no_grad():
        for name, weight in dit.named_parameters():
            weight.copy_(before[name] + strength * (weight - before[name]))
    assert torch.allclose(prediction(added), prediction(merged), atol=1e-5)


def test_dropout_acts_in_training_alone(here: Path) -> None:
    given = {"lora_dropout": 0.5, **PLACES["text_encoder"]}
    module = training_run(config(here, **given)).module
    with torch.no_grad():
        for parameter in module.trained_parameters:
            parameter.fill_(0.3)
    layer: Any = module.pipeline.components["text_encoder"].get_submodule("layer")
    x = torch.ones(1, 3, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("lora_type", ["lora", "dora"])
def test_dropout_of_a_live_unit_does_not_depend_on_the_batch(
    lora_type: str, here: Path
) -> None:
    given = {"lora_dropout": 0.5, "lora_type": lora_type, **PLACES["text_encoder"]}
    ready = training_run(config(here, **given))
    module = ready.module
    with torch.no_grad():
        for name, parameter in module.trained.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.3)
    samples = [ready.source.sample(row) for row in (0, 2, 4)]
    keys = [SampleKey(0, 0, 0, row) for row in (0, 2, 4)]
    together = module.losses(samples, keys)
    alone = [
        module.losses([one], [key]) for one, key in zip(samples, keys, strict=True)
    ]
    assert (together - torch.cat(alone)).abs().max() <= 1e-6
    others = module.losses(samples, [one._replace(repeat=1) for one in keys])
    assert not torch.equal(together, others)


@pytest.mark.parametrize("name", TYPES)
def test_a_dry_run_counts_what_is_trained(
    name: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "tiny", "--toy", "--dataset_base_path", str(here / "data")]
    words += ["--output_path", str(tmp_path / "out"), "--lora_rank", "2"]
    for flag, value in TYPES[name].items():
        words += [f"--{flag}", str(value)]
    assert main([*words, "--dry_run"]) == 0
    out = capsys.readouterr().out
    ready = training_run(config(here, **TYPES[name]))
    count = sum(one.numel() for one in ready.module.trained_parameters)
    assert re.search(rf"trained weights .* {count} parameters in fp32", out)
    assert re.search(r"activations +[\d.]+ [KM]iB", out)


def test_the_header_says_what_was_trained(here: Path, tmp_path: Path) -> None:
    heads = {}
    for name, flags in {"plain": {}, **TYPES}.items():
        output = train(here, output_path=tmp_path / name, max_steps=1, **flags)
        with safe_open(output / "step-1.safetensors", "pt") as file:
            heads[name] = file.metadata()
    assert not {"type", "dropout", "ranks", "alphas"} & heads["plain"].keys()
    assert heads["dropout"]["dropout"] == "0.3"
    assert heads["dora"]["type"] == "dora"
    assert heads["ranks"]["rank"] == "3"
    assert heads["ranks"]["ranks"] == '{"blocks.0.to_out": 2, "blocks.1.to_out": 2}'
    assert '"blocks.1.to_q": 4.0' in heads["ranks"]["alphas"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora_rank": "to_k=4"}, r"--lora_rank: 'to_k' matches no layer with LoRA"),
        ({"lora_alpha": "to_q=4,blocks=2"}, r"'to_q' has no effect: later patterns"),
        ({"lora_type": "dora", "lora_format": "diffsynth"}, "no key names for dora"),
        ({"lora_type": "lokr", "lora_format": "diffsynth"}, "no key names for lokr"),
        (
            {"lora_type": "lokr", "lora_dropout": 0.1},
            "lokr has no dropout of its input",
        ),
        ({"lokr_factor": 4}, "--lokr_factor: has no effect without --lora_type lokr"),
        ({"lora_rank": "to_q=0"}, "--lora_rank: expected 1 or more, got 0"),
        ({"lora_dropout": 1.0}, "--lora_dropout: expected less than 1, got 1.0"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_trained(
    flags: Mapping[str, Any], words: str, here: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        train(here, output_path=tmp_path / "out", **flags)
    assert not list(tmp_path.rglob("*.safetensors"))
