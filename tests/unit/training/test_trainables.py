"""What is trained: whole components, parts of them, LoRA layers; and that nothing else
is.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Trainables, TrainingModule, UsageError
from dstrain.runs.loop import steps
from dstrain.runs.resolve import resolve
from torch import nn

from tests.support.runs import (
    config,
    files,
    opened,
    project,
    same,
    train,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"), dropout=0.2)


TRAINED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "LoRA": ({}, ("dit.blocks.0.to_q.lora_A", "dit.blocks.1.to_out.lora_B")),
    "full": (
        {"trainable_models": "dit"},
        ("dit.proj_in", "dit.blocks.0.text", "dit.blocks.1.to_q", "dit.time"),
    ),
    "part": (
        {"trainable_models": "dit.blocks.1"},
        ("dit.blocks.1.to_q", "dit.blocks.1.to_out"),
    ),
    "parts": (
        {"trainable_models": "dit.time,dit.blocks.0.text"},
        ("dit.time", "dit.blocks.0.text"),
    ),
    "text encoder": (
        {"trainable_models": "text_encoder"},
        ("text_encoder.embed", "text_encoder.layer"),
    ),
    "LoRA in the text encoder": (
        {"lora_base_model": "text_encoder"},
        ("text_encoder.layer.lora_B",),
    ),
    "full and LoRA": (
        {"trainable_models": "text_encoder", "lora_base_model": "dit"},
        ("text_encoder.embed", "dit.blocks.0.to_q.lora_A"),
    ),
    "part and LoRA": (
        {"trainable_models": "text_encoder.layer", "lora_base_model": "dit"},
        ("text_encoder.layer", "dit.blocks.0.to_q.lora_A"),
    ),
}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_every_trained_parameter_is_fp32_and_gets_a_gradient_and_nothing_else_does(
    name: str, precision: str, here: Path
) -> None:
    flags, expected = TRAINED[name]
    ready = training_run(config(here, mixed_precision=precision, **flags))
    components, trained = (
        ready.module.pipeline.components,
        ready.module.trained.parameters,
    )
    for part in expected:
        assert any(parameter.startswith(f"{part}.") for parameter in trained), part
    if "part" in name:
        assert all(
            parameter.startswith(expected)
            for parameter in trained
            if "lora" not in parameter
        )
    open_ones = {
        id(parameter)
        for component in components.values()
        if isinstance(component, nn.Module)
        for parameter in component.parameters()
        if parameter.requires_grad
    }
    assert open_ones == {id(parameter) for parameter in trained.values()}
    seen: set[str] = set()
    ready.optimizer.register_step_pre_hook(
        lambda *_: seen.update(
            key
            for key, value in trained.items()
            if value.grad is not None and value.grad.any()
        )
    )
    assert len(list(steps(ready))) == 6
    assert seen == set(trained)
    assert all(parameter.dtype == torch.float32 for parameter in trained.values())
    frozen = list(components["vae"].parameters())
    assert {p.dtype for p in frozen} == {
        torch.bfloat16 if precision == "bf16" else torch.float32
    }


def test_only_what_is_trained_is_in_training_mode(here: Path) -> None:
    components = training_run(config(here)).module.pipeline.components
    assert components["dit"].training
    assert not components["text_encoder"].training
    assert not components["vae"].training
    components = training_run(
        config(here, trainable_models="text_encoder.embed")
    ).module.pipeline.components
    assert not components["dit"].training
    assert not components["text_encoder"].training
    assert components["text_encoder"].embed.training


def test_training_mode_of_before_is_no_matter(here: Path) -> None:
    ready = training_run(config(here))
    components = ready.module.pipeline.components
    for name in ("dit", "text_encoder", "vae"):
        components[name].train().requires_grad_(True)
    ready.module.switch_to_training_mode(Trainables(full=("dit.time",)))
    assert not components["text_encoder"].training
    assert not components["dit"].blocks.training
    assert components["dit"].time.training
    opened = [
        name
        for name, value in components["dit"].named_parameters()
        if value.requires_grad
    ]
    assert opened == ["time.weight", "time.bias"]
    assert not any(value.requires_grad for value in components["vae"].parameters())


def test_what_is_trained_may_be_said_as_by_the_options(here: Path) -> None:
    def trained() -> list[str]:
        return sorted(module.trained.parameters)

    module = TrainingModule(opened(here / "model"))
    module.switch_to_training_mode()
    assert set(trained()) == set(training_run(config(here)).module.trained.parameters)
    module = TrainingModule(opened(here / "model"))
    module.switch_to_training_mode(
        lora_base_model="dit", lora_target_modules=["to_q"], lora_rank=4
    )
    assert trained()
    assert all(".to_q." in name for name in trained())
    ranks = {
        len(one) for name, one in module.trained.parameters.items() if "lora_A" in name
    }
    assert ranks == {4}
    module = TrainingModule(opened(here / "model"))
    module.switch_to_training_mode(trainable_models="dit.time")
    assert trained() == ["dit.time.bias", "dit.time.weight"]
    with pytest.raises(UsageError, match="give one of them"):
        module.switch_to_training_mode(Trainables(("dit",)), trainable_models="dit")


def test_training_starts_from_a_lora_that_is_named(here: Path, tmp_path: Path) -> None:
    train(here, output_path=tmp_path, max_steps=2)
    file = tmp_path / "step-2.safetensors"
    module = TrainingModule(opened(here / "model"))
    module.switch_to_training_mode(lora_rank=2, lora_checkpoint=str(file))
    started = training_run(config(here, lora_checkpoint=file)).module
    assert same(
        dict(sorted(module.trained.parameters.items())),
        dict(sorted(started.trained.parameters.items())),
    )


def test_a_part_is_saved_as_its_whole_component_and_only_the_part_has_changed(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, trainable_models="dit.blocks.0.to_q,dit.time")
    before = (
        training_run(config(here, trainable_models="dit"))
        .module.pipeline.components["dit"]
        .state_dict()
    )
    (after,) = files(tmp_path).values()
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {
        f"{part}.{kind}"
        for part in ("blocks.0.to_q", "time")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("trainable", "unused_parameters"),
    [
        ("dit", ["dit.blocks.1.text.weight", "dit.blocks.1.text.bias"]),
        ("text_encoder", ["text_encoder.head.weight", "text_encoder.head.bias"]),
    ],
)
def test_what_no_loss_reaches_is_frozen_and_named(
    trainable: str, unused_parameters: list[str], here: Path
) -> None:
    module = training_run(config(here, trainable_models=trainable)).module
    assert module.trained.unused_parameters == unused_parameters
    assert not set(unused_parameters) & set(module.trained.parameters)


def test_lora_layers_where_no_loss_reaches_are_frozen_too(here: Path) -> None:
    module = training_run(config(here, lora_target_modules="text,to_q")).module
    assert module.trained.matched_modules == {"dit": {"text": 2, "to_q": 2}}
    assert {
        name.partition(".lora")[0] for name in module.trained.unused_parameters
    } == {"dit.blocks.1.text"}
    assert "dit.blocks.0.text.lora_A.default.weight" in module.trained.parameters


def test_lora_starts_at_nothing_depends_on_the_seed_alone_and_counts_its_matches(
    here: Path,
) -> None:
    first, again, other = (
        training_run(config(here, seed=seed)).module for seed in (1, 1, 2)
    )
    assert first.trained.matched_modules == {"dit": {"to_q": 2, "to_out": 2}}
    for name, parameter in first.trained.parameters.items():
        assert torch.equal(parameter, again.trained.parameters[name])
        if "lora_B" in name:
            assert not parameter.any()
        else:
            assert not torch.equal(parameter, other.trained.parameters[name])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"trainable_models": "dit.bloks.0"},
            r"'dit\.bloks\.0' is not a loaded network or a part of one; did you mean 'blocks\.0'",
        ),
        (
            {"trainable_models": "dti"},
            "tiny base has no component 'dti'; did you mean 'dit'",
        ),
        ({"trainable_models": "dit.blocks.1.text"}, "nothing to train in dit"),
        ({"trainable_models": "tokenizer"}, "'tokenizer' is not a loaded network"),
        ({"lora_target_modules": "to_q,to_w"}, "no layer of dit matches 'to_w'"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    flags: dict[str, str], message: str, here: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        training_run(config(here, **flags))


def test_a_component_without_default_targets_asks_for_them(here: Path) -> None:
    with pytest.raises(
        UsageError, match="tiny has no default targets for 'vae'"
    ) as caught:
        resolve(config(here, lora_base_model="vae"))
    assert "dit, text_encoder" in str(caught.value)


def test_a_parameter_put_in_the_place_of_another_is_the_trained_one(here: Path) -> None:
    module = training_run(config(here, trainable_models="dit")).module
    before = module.trained.parameters
    name = "dit.blocks.0.text.weight"
    other = nn.Parameter(before[name].detach() + 1)
    module.pipeline.components["dit"].blocks[0].text.weight = other
    assert module.trained.parameters[name] is other
    assert list(module.trained.parameters) == list(before)
    assert any(one is other for one in module.trained_parameters)
