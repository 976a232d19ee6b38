"""TrainingModule: its loss is a share of the global mean, a batch equals its samples,
and it holds what a step uses.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import SFT, Sample, SampleKey, Task, TrainingModule, UsageError, run
from dstrain.plugin import Unit
from dstrain.runs.loop import steps, update
from dstrain.runs.training_run import TrainingRun
from torch import Tensor

from tests.support.runs import config, log, project, same, training_run
from tests.support.training_batches import (
    assert_batch_equals_its_samples,
    batch,
    gradients,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize("trained", ["dit", "dit,text_encoder"])
def test_a_batch_has_the_losses_and_gradients_of_its_samples(
    trained: str, here: Path
) -> None:
    """Their texts are of different lengths, so this holds only if what pads them
    changes nothing.
    """
    ready = training_run(config(here, trainable_models=trained))
    assert_batch_equals_its_samples(ready, (0, 2, 4))


def test_dropout_of_a_train_step_does_not_depend_on_the_batch(here: Path) -> None:
    """The text encoder has dropout, and is in training mode."""
    ready = training_run(config(here, trainable_models="text_encoder"))
    module = ready.module
    assert module.pipeline.components["text_encoder"].training
    rows = (0, 2, 4)
    one = gradients(module, [batch(ready, rows)])
    many = gradients(module, [batch(ready, (row,), total=3) for row in rows])
    assert max((one[name] - many[name]).abs().max().item() for name in one) <= 1e-6
    samples = batch(ready, (0, 0)).samples
    keys = [SampleKey(0, 0, repeat, 0) for repeat in (0, 1)]
    first, second = module.losses(samples, [keys[0]] * 2).tolist()
    assert first == second
    assert module.losses(samples, keys)[1].item() != second


def test_an_error_knows_the_rows_it_is_about(here: Path) -> None:
    ready = training_run(config(here, trainable_models="dit"))
    one = batch(ready, (3, 5))
    samples = [replace(sample, values={"prompt": "1"}) for sample in one.samples]
    unit = ready.module.plan(samples[0].inputs).cached_steps[0].unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "run", refusing)
        with pytest.raises(UsageError) as caught:
            ready.module.losses(samples[1:], one.micro_batch.keys[1:])
    assert caught.value.rows == (5,)
    assert unit.name in caught.value.where


def refusing(unit: Unit, *arguments: Any, **named: Any) -> None:
    raise UsageError(f"unit {unit.name}", "refused")


def test_the_loss_is_the_weighted_share_of_the_global_batch(here: Path) -> None:
    ready = training_run(config(here, trainable_models="dit"))
    losses = ready.module.losses(
        batch(ready, (0, 2)).samples, batch(ready, (0, 2)).micro_batch.keys
    )
    assert ready.module(batch(ready, (0, 2), (1.0, 0.0), 8)).item() == pytest.approx(
        losses[0].item() / 8
    )
    filler = gradients(ready.module, [batch(ready, (0,), (0.0,), 8)])
    assert set(filler) == set(
        ready.module.trained.parameters
    )  # so that processes that wait for it get it
    assert not any(gradient.any() for gradient in filler.values())


@pytest.mark.parametrize(
    ("flags", "stage", "registered"),
    [
        ({}, "sft", {"dit"}),
        ({}, "sft:train", {"dit"}),
        ({"trainable_models": "text_encoder"}, "sft", {"dit", "text_encoder"}),
        ({"trainable_models": "text_encoder"}, "sft:train", {"dit", "text_encoder"}),
    ],
)
def test_only_what_a_training_step_uses_is_registered(
    flags: dict[str, str], stage: str, registered: set[str], here: Path, tmp_path: Path
) -> None:
    if stage == "sft:train":
        run(config(here, task="sft:data_process", feature_cache=tmp_path, **flags))
    module = training_run(
        config(here, task=stage, feature_cache=tmp_path, **flags)
    ).module
    assert {name.split(".")[1] for name, _ in module.named_parameters()} == registered
    assert ("vae" in module.pipeline.components) == (stage == "sft")


def test_frozen_units_run_once_per_sample_without_gradients_and_keep_what_crosses(
    here: Path,
) -> None:
    ready = training_run(config(here))
    sample = ready.source.sample(0)
    made = ready.module.preprocess(sample, ready.module.plan(sample.inputs))
    assert set(made) == {"input_latents", "prompt_emb", "prompt_mask"}
    assert not any(value.requires_grad for value in made.values())
    assert same(made, ready.module.preprocess(sample, ready.module.plan(sample.inputs)))


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((), "returned a scalar"),
        ((1,), r"returned losses of shape \[1\]"),
        ((2, 1), r"returned losses of shape \[2, 1\]"),
        (None, "returned float, not a tensor"),
    ],
)
def test_losses_that_are_not_one_per_sample_are_refused(
    here: Path, shape: tuple[int, ...] | None, what: str
) -> None:
    def returned() -> Any:
        return 0.5 if shape is None else torch.ones(shape)

    def mean_loss(predict: Any, input_latents: Tensor) -> Tensor:
        return returned()

    class Mean(TrainingModule):
        def losses(self, samples: Any, keys: Any) -> Tensor:
            return returned()

    ready = training_run(config(here, trainable_models="dit"))
    one = batch(ready, (3, 5))
    ready.module.task = Task.of("mean", mean_loss)
    wanted = f"{what}; expected one loss per sample, of shape \\[2\\]"
    with pytest.raises(UsageError, match=f"mean_loss: {wanted}"):
        ready.module.losses(one.samples, one.micro_batch.keys)
    with pytest.raises(UsageError, match=f"Mean.losses: {wanted}"):
        Mean(ready.module.pipeline)(one)


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (torch.ones(2, dtype=torch.long), "returned losses of torch.int64, not of"),
        (torch.ones(2), "do not depend on what is trained"),
    ],
)
def test_losses_without_a_gradient_are_refused(
    here: Path, returned: Tensor, what: str
) -> None:
    def constant_loss(predict: Any, input_latents: Tensor) -> Tensor:
        return returned

    class Constant(TrainingModule):
        def losses(self, samples: Any, keys: Any) -> Tensor:
            return returned

    ready = training_run(config(here, trainable_models="dit"))
    one = batch(ready, (3, 5))
    module = Constant(ready.module.pipeline)
    module.trained = ready.module.trained
    with pytest.raises(UsageError, match=f"Constant.losses: .*{what}"):
        module.refuse_without_gradient(module(one))
    ready.module.task = Task.of("constant", constant_loss)
    with pytest.raises(UsageError, match=f"constant_loss: .*{what}"):
        update(ready, [one])


def test_what_is_trained_is_no_text(here: Path) -> None:
    module = TrainingModule(training_run(config(here)).module.pipeline)
    name: Any = "dit"
    with pytest.raises(UsageError, match="trainables: expected Trainables, got 'dit'"):
        module.switch_to_training_mode(name)


def test_a_subclass_can_have_a_loss_of_its_own(here: Path, tmp_path: Path) -> None:
    class Halved(TrainingModule):
        def losses(self, samples: Any, keys: Any) -> Tensor:
            return super().losses(samples, keys) / 2

    whole = next(steps(training_run(config(here))))
    halved = next(steps(training_run(config(here), Halved)))
    assert halved["loss"] == whole["loss"] / 2
    run(config(here, output_path=tmp_path, max_steps=1), Halved)
    assert log(tmp_path)[0]["loss"] == pytest.approx(whole["loss"] / 2, rel=1e-5)


def test_a_module_is_made_from_a_pipeline_in_a_script(here: Path) -> None:
    ready = training_run(config(here))
    module = TrainingModule(ready.module.pipeline, SFT)
    module.trained = ready.module.trained
    sample = ready.source.sample(1)
    assert isinstance(sample, Sample)
    assert torch.equal(module(batch(ready, (1,))), ready.module(batch(ready, (1,))))


@pytest.mark.parametrize(
    "flag", ["use_gradient_checkpointing", "use_gradient_checkpointing_offload"]
)
@pytest.mark.parametrize("trained", ["dit", "text_encoder,dit"])
def test_checkpointing_changes_no_gradient_by_a_bit(
    flag: str, trained: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The denoiser has dropout, which must be the same when activations are computed
    again.
    """
    dropping = project(tmp_path_factory.mktemp("dropping"), dropout=0.3)
    if "text_encoder" in trained:  # it cannot checkpoint, and it is trained
        with pytest.raises(
            UsageError, match=r"text_encoder \(TextEncoder\) does not support it"
        ):
            training_run(config(dropping, trainable_models=trained, **{flag: True}))
        return
    plain, checked = (
        training_run(config(dropping, trainable_models=trained, **flags))
        for flags in ({}, {flag: True})
    )
    kept = saved_bytes(plain), saved_bytes(checked)
    assert kept[1] < kept[0]
    rows = batch(plain, (0, 2, 4))
    assert torch.equal(plain.module(rows), checked.module(rows))
    assert same(gradients(plain.module, [rows]), gradients(checked.module, [rows]))


def saved_bytes(ready: TrainingRun) -> int:
    """Bytes that one forward pass keeps for the backward pass."""
    kept = 0

    def pack(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.nbytes
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        ready.module(batch(ready, (0, 2, 4)))
    return kept


def test_a_frozen_network_that_cannot_checkpoint_is_left_as_it_is(here: Path) -> None:
    ready = training_run(
        config(here, trainable_models="dit", use_gradient_checkpointing=True)
    )
    assert ready.module.pipeline.components["dit"].checkpoint is not None
