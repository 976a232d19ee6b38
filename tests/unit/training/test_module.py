"""A batch equals its samples, and a module holds what a step uses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import SampleKey, Task, TimestepSampler, TrainingModule, UsageError
from torch import Tensor

from tests.support import family
from tests.support.runs import config, project, same, train, training_run
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
    """Their texts are of different lengths: what pads them changes nothing."""
    ready = training_run(config(here, trainable_models=trained))
    assert_batch_equals_its_samples(ready, (0, 2, 4))


def test_a_module_of_a_script_has_the_variants_own_objective(here: Path) -> None:
    pipeline = training_run(config(here)).module.pipeline
    changed = replace(pipeline.spec, training_defaults={"loss_weighting": "min_snr"})
    pipeline.spec = changed
    own = TrainingModule(pipeline).timestep_sampler
    assert own == TimestepSampler(changed.schedule, "shifted", "min_snr")


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


def test_an_error_knows_its_rows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_prompt(
        prompt: str, *, text_encoder: Any, tokenizer: Any
    ) -> family.Prompt:
        if prompt == "dog and cat":
            raise UsageError("unit encode_prompt", "refused")
        made = family.encode_prompt(
            prompt, text_encoder=text_encoder, tokenizer=tokenizer
        )
        return {**made}

    units = (encode_prompt, *family.BASE.units[1:])
    monkeypatch.setitem(family.PIPELINES, "base", replace(family.BASE, units=units))
    ready = training_run(config(here))
    one = batch(ready, (3, 5))
    with pytest.raises(UsageError) as caught:
        ready.module.losses(one.samples, one.micro_batch.keys)
    assert caught.value.rows == (5,)


@pytest.mark.parametrize("stage", ["sft", "sft:train"])
@pytest.mark.parametrize(
    ("flags", "registered"),
    [({}, {"dit"}), ({"trainable_models": "text_encoder"}, {"dit", "text_encoder"})],
)
def test_only_what_a_training_step_uses_is_registered(
    flags: dict[str, Any], registered: set[str], stage: str, here: Path, tmp_path: Path
) -> None:
    given = {"feature_cache": tmp_path, **flags}
    if stage == "sft:train":
        train(here, task="sft:data_process", **given)
    module = training_run(config(here, task=stage, **given)).module
    assert {name.split(".")[1] for name, _ in module.named_parameters()} == registered
    assert ("vae" in module.pipeline.components) == (stage == "sft")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.ones(()), r"\[\].*\[2\]"),
        (torch.ones(1), r"\[1\].*\[2\]"),
        (torch.ones(2, 1), r"\[2, 1\].*\[2\]"),
        (0.5, r"float.*\[2\]"),
        (torch.ones(2, dtype=torch.long), r"torch\.int64"),
        (torch.ones(2), "trained"),
    ],
)
def test_losses_that_are_not_one_per_sample_or_have_no_gradient_are_refused(
    here: Path, tmp_path: Path, returned: Any, said: str
) -> None:
    def own_loss(predict: Any, input_latents: Tensor) -> Tensor:
        return returned

    class OwnTask(TrainingModule):
        def switch_to_training_mode(self, *arguments: Any) -> None:
            super().switch_to_training_mode(*arguments)
            self.task = Task.of("own", own_loss)

    class OwnLosses(TrainingModule):
        def losses(self, samples: Any, keys: Any) -> Tensor:
            return returned

    flags = {"trainable_models": "dit", "dataset_repeat": 2, "output_path": tmp_path}
    for module, where in ((OwnTask, "own_loss"), (OwnLosses, r"OwnLosses\.losses")):
        with pytest.raises(UsageError, match=f"(?s){where}: .*{said}"):
            train(here, module, batch_size=2, max_steps=1, overwrite=True, **flags)


def test_what_is_trained_is_no_text(here: Path) -> None:
    module = TrainingModule(training_run(config(here)).module.pipeline)
    name: Any = "dit"
    with pytest.raises(UsageError, match=r"trainables: .*'dit'"):
        module.switch_to_training_mode(name)


def saved_bytes(ready: Any) -> int:
    """Bytes that one forward pass keeps for the backward pass."""
    kept = 0

    def pack(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.nbytes
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        ready.module(batch(ready, (0, 2, 4)))
    return kept


@pytest.mark.parametrize(
    "flag", ["use_gradient_checkpointing", "use_gradient_checkpointing_offload"]
)
def test_checkpointing_changes_no_gradient_by_a_bit(flag: str, tmp_path: Path) -> None:
    """The denoiser has dropout, which must be the same when activations are computed
    again.
    """
    dropping = project(tmp_path, dropout=0.3)
    plain, checked = (
        training_run(config(dropping, trainable_models="dit", **flags))
        for flags in ({}, {flag: True})
    )
    assert saved_bytes(checked) < saved_bytes(plain)
    rows = batch(plain, (0, 2, 4))
    assert torch.equal(plain.module(rows), checked.module(rows))
    assert same(gradients(plain.module, [rows]), gradients(checked.module, [rows]))
    # The encoder cannot: it is refused where it is trained, and else left as it is.
    with pytest.raises(UsageError, match=r"text_encoder \(TextEncoder\)"):
        training_run(
            config(dropping, trainable_models="text_encoder,dit", **{flag: True})
        )
