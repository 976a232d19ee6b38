"""What is trained: components, parts of them, LoRA layers; and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Batch, Trainables, TrainingModule, UsageError
from torch import Tensor, nn

from tests.support.runs import config, opened, project, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"), dropout=0.2)


LORA = r"dit\.blocks\.[01]\.(to_q|to_out)\.lora_[AB]\.default\.weight"
DIT = r"dit\.(proj_in|time|proj_out|blocks\.0\.\w+|blocks\.1\.to_(q|out))\.\w+"
ENCODER = r"text_encoder\.(embed|layer)\.\w+"
TRAINED: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({}, LORA, 8),
    ({"trainable_models": "dit"}, DIT, 16),
    ({"trainable_models": "dit.blocks.1"}, r"dit\.blocks\.1\.to_(q|out)\.\w+", 4),
    (
        {"trainable_models": "dit.time,dit.blocks.0.text"},
        r"dit\.(time|blocks\.0\.text)\.\w+",
        4,
    ),
    ({"trainable_models": "text_encoder"}, ENCODER, 3),
    (
        {"lora_base_model": "text_encoder"},
        r"text_encoder\.layer\.lora_[AB]\.default\.weight",
        2,
    ),
    (
        {"lora_base_model": "text_encoder,dit"},
        rf"text_encoder\.layer\.lora_[AB]\.default\.weight|{LORA}",
        10,
    ),
    (
        {"trainable_models": "text_encoder", "lora_base_model": "dit"},
        f"{ENCODER}|{LORA}",
        11,
    ),
    (
        {"trainable_models": "text_encoder.layer", "lora_base_model": "dit"},
        rf"text_encoder\.layer\.\w+|{LORA}",
        10,
    ),
)
"""Flags, the names of what they train, and how many these are."""


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("flags", "names", "count"), TRAINED, ids=range(len(TRAINED)))
def test_every_trained_parameter_is_fp32_and_gets_a_gradient_and_nothing_else_does(
    flags: dict[str, Any],
    names: str,
    count: int,
    precision: str,
    here: Path,
    tmp_path: Path,
) -> None:
    reached: set[str] = set()

    class Watching(TrainingModule):
        def forward(self, batch: Batch) -> Tensor:
            for name, parameter in self.trained.parameters.items():
                if not parameter._post_accumulate_grad_hooks:

                    def note(one: Tensor, name: str = name) -> None:
                        if one.grad is not None and one.grad.any():
                            reached.add(name)

                    parameter.register_post_accumulate_grad_hook(note)
            modules.append(self)
            return super().forward(batch)

    modules: list[TrainingModule] = []
    given = {"mixed_precision": precision, "output_path": tmp_path, **flags}
    train(here, Watching, **given)
    assert len(modules) == 6
    trained = modules[0].trained.parameters
    assert reached == set(trained)
    assert len(trained) == count
    assert all(re.fullmatch(names, name) for name in trained)
    assert all(parameter.dtype == torch.float32 for parameter in trained.values())
    components = modules[0].pipeline.components
    networks = [one for one in components.values() if isinstance(one, nn.Module)]
    opened = {id(p) for one in networks for p in one.parameters() if p.requires_grad}
    assert opened == {id(parameter) for parameter in trained.values()}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {one.dtype for one in components["vae"].parameters()} == {dtype}


def test_what_is_trained_may_be_said_as_by_the_options(here: Path) -> None:
    def trained(**options: Any) -> dict[str, nn.Parameter]:
        module = TrainingModule(opened(here / "model"))
        module.switch_to_training_mode(**options)
        return module.trained.parameters

    by_default = training_run(config(here)).module.trained.parameters
    assert set(trained()) == set(by_default)
    targets = {"lora_base_model": ["dit"], "lora_target_modules": ["to_q"]}
    layers = trained(lora_rank=4, **targets)
    assert layers and all(".to_q." in name for name in layers)
    assert {len(one) for name, one in layers.items() if "lora_A" in name} == {4}
    part = trained(trainable_models="dit.time")
    assert sorted(part) == ["dit.time.bias", "dit.time.weight"]
    for also in ({"trainable_models": "dit"}, {"lora_rank": 4}):
        with pytest.raises(UsageError, match="trainables"):
            trained(trainables=Trainables(("dit",)), **also)


def test_training_starts_from_a_lora_that_is_named(here: Path, tmp_path: Path) -> None:
    train(here, output_path=tmp_path, max_steps=2)
    file = tmp_path / "step-2.safetensors"
    module = TrainingModule(opened(here / "model"))
    module.switch_to_training_mode(lora_rank=2, lora_checkpoint=f"dit={file}")
    started = training_run(config(here, lora_checkpoint=file)).module
    ours, theirs = (
        dict(sorted(one.trained.parameters.items())) for one in (module, started)
    )
    assert same(ours, theirs)


@pytest.mark.parametrize(
    ("flags", "unused", "used"),
    [
        ({"trainable_models": "dit"}, "dit.blocks.1.text", "dit.blocks.0.text.weight"),
        ({"trainable_models": "text_encoder"}, "text_encoder.head", None),
        (
            {"lora_target_modules": "text,to_q"},
            "dit.blocks.1.text",
            "dit.blocks.0.text.lora_A.default.weight",
        ),
    ],
)
def test_what_no_loss_reaches_is_frozen_and_named(
    flags: dict[str, Any], unused: str, used: str | None, here: Path
) -> None:
    trained = training_run(config(here, **flags)).module.trained
    assert len(trained.unused_parameters) == 2
    assert all(name.startswith(f"{unused}.") for name in trained.unused_parameters)
    assert not set(trained.unused_parameters) & set(trained.parameters)
    assert used is None or used in trained.parameters


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"trainable_models": "dit.bloks.0"}, r"'dit\.bloks\.0'.*'blocks\.0'"),
        ({"trainable_models": "dti"}, "'dti'.*'dit'"),
        ({"trainable_models": "dit.blocks.1.text"}, "--trainable_models: .*dit"),
        ({"trainable_models": "tokenizer"}, "'tokenizer'"),
        ({"lora_target_modules": "to_q,to_w"}, "dit .*'to_w'"),
        (
            {"lora_base_model": "vae"},
            "(?s)--lora_target_modules: .*'vae'.*dit, text_encoder",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    flags: dict[str, str], said: str, here: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        training_run(config(here, **flags))


def test_a_parameter_put_in_the_place_of_another_is_the_trained_one(here: Path) -> None:
    module = training_run(config(here, trainable_models="dit")).module
    before = module.trained.parameters
    name = "dit.blocks.0.text.weight"
    other = nn.Parameter(before[name].detach() + 1)
    module.pipeline.components["dit"].blocks[0].text.weight = other
    assert module.trained.parameters[name] is other
    assert list(module.trained.parameters) == list(before)
    assert any(one is other for one in module.trained_parameters)
