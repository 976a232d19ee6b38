"""Compute the loss of a task on batches, as one nn.Module."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dstrain.config import LoraFile
from dstrain.config.converters import as_commas
from dstrain.config.options import DEFAULT_RANK, LoraOptions
from dstrain.errors import UsageError, about_rows
from dstrain.graph import LongPrompt, Plan, Task, make_plan, noticing_long_prompts
from dstrain.graph.read_only import read_only
from dstrain.graph.timestep_sampler import TimestepSampler
from dstrain.lora import Trainables
from dstrain.pipeline import (
    Pipeline,
    check_measured,
    checked,
    inference_sigmas,
    integrate,
)
from dstrain.randomness import Rng, SampleKey, seed_global
from dstrain.training.collate import collate
from dstrain.training.loader import Batch
from dstrain.training.losses import SFT, LossOptions
from dstrain.training.sample_sources import Sample
from dstrain.training.trainables import (
    TrainableModules,
    prepare_trainables,
    start_from_lora,
    trainables_of,
)


class TrainingModule(nn.Module):
    """A pipeline, a task and what is trained; calling it returns the loss of a batch.

    It serves every family and task. Subclass it and override `forward` or `losses` for
    another algorithm. Only networks that a training step uses are registered in it:
    wrappers broadcast or shard what is registered, and encoders need neither.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        task: Task = SFT,
        timestep_sampler: TimestepSampler | None = None,
        stage: str = "",
    ) -> None:
        """Wrap a pipeline; nothing is trained before `switch_to_training_mode`.

        The timestep sampler is by default the variant's, for all timesteps. Stage
        '' runs every unit; 'train' expects samples of cached values.
        """
        super().__init__()
        self.pipeline = pipeline
        self.task = task
        spec = pipeline.spec
        own = spec.defaults_of_training
        self.timestep_sampler: TimestepSampler = timestep_sampler or TimestepSampler(
            spec.schedule, own["timestep_sampling"], own["loss_weighting"]
        )
        self.loss_options = LossOptions()
        self.stage = stage
        self.on_long_prompt: Callable[[SampleKey, LongPrompt], object] = _ignore
        """Called with each prompt that is longer than the model takes."""
        self.trained: TrainableModules = TrainableModules()
        self.networks: nn.ModuleDict = nn.ModuleDict()
        self._plans: dict[frozenset[str], Plan] = {}

    def switch_to_training_mode(
        self,
        trainables: Trainables | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        *,
        trainable_models: str | Sequence[str] | None = None,
        lora_base_model: str | Sequence[str] | None = None,
        lora_target_modules: str | Sequence[str] | None = None,
        lora_rank: int | str = DEFAULT_RANK,
        lora_alpha: float | str | None = None,
        lora_checkpoint: str | Path | None = None,
    ) -> None:
        """Freeze everything, then make the named components or LoRA layers trainable, in
        this dtype.

        What is trained is said by `trainables`, or by the other arguments as by the
        options of their names; without any, it is LoRA on the family's component. Raises
        UsageError for both, and for what cannot be trained; StateError for a
        checkpoint that does not fit.
        """
        options = LoraOptions(
            lora_base_model=as_commas(lora_base_model),
            lora_target_modules=as_commas(lora_target_modules),
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
        )
        full = as_commas(trainable_models)
        if not isinstance(trainables, Trainables | None):
            what = f"expected Trainables, got {trainables!r}"
            advice = "components are named by trainable_models=..."
            raise UsageError("trainables", what, advice)
        if trainables is None:
            trainables = trainables_of(full, options, self.pipeline.family)
        elif full or options != LoraOptions():
            what = "is given together with arguments that say what is trained, too"
            raise UsageError("trainables", what, "give one of them")
        seed_global((seed,), "lora")
        self.trained = prepare_trainables(self.pipeline, trainables, dtype)
        self._plans.clear()
        if lora_checkpoint is not None:
            file = LoraFile(Path(lora_checkpoint)).of(self.pipeline.components)
            start_from_lora(self.pipeline, self.trained.lora, file)

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer updates, in a fixed order."""
        return list(self.trained.parameters.values())

    @property
    def trained_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of trained components that are part of their weights, such
        as the running statistics of a batch norm, by name.
        """
        buffers = {}
        for component in self.trained.components:
            network = self.pipeline.components[component]
            saved = network.state_dict()
            for name, buffer in network.named_buffers():
                if name in saved:
                    buffers[f"{component}.{name}"] = buffer
        return buffers

    def plan(self, inputs: frozenset[str]) -> Plan:
        """Return the plan for samples with these inputs, and register the networks that
        a training step of it uses.
        """
        if inputs not in self._plans:
            spec = self.pipeline.spec
            plan = make_plan(spec, inputs, self.task, self.trained.components)
            self._plans[inputs] = plan
            for name in plan.components["train"]:
                component = self.pipeline.components.get(name)
                if isinstance(component, nn.Module):
                    self.networks[name] = component
        return self._plans[inputs]

    @property
    def used_components(self) -> frozenset[str]:
        """Return the components that the loss depends on, those of cached values
        included.
        """
        plans = self._plans.values()
        return frozenset(name for plan in plans for name in plan.components[""])

    def forward(self, batch: Batch) -> Tensor:
        """Return the batch's share of the global mean loss (scalar): the sum of weight x
        loss, divided by the samples of the global batch.
        """
        micro_batch = batch.micro_batch
        losses = self.losses(batch.samples, micro_batch.keys)
        # A subclass may have returned anything.
        where = f"{type(self).__name__}.losses"
        _check_losses(losses, len(batch.samples), where)
        if any(weight != 1.0 for weight in micro_batch.weights):
            weights = torch.tensor(micro_batch.weights).to(losses.device)
            losses = losses * weights
        return losses.sum() / micro_batch.global_batch_size

    def refuse_without_gradient(self, loss: Tensor) -> None:
        """Raise UsageError for a loss of `forward` that does not depend on what is trained."""
        if loss.requires_grad:
            return
        is_own = type(self).losses is not TrainingModule.losses
        where = f"{type(self).__name__}.losses" if is_own else self.task.loss.where
        what = "returned losses that do not depend on what is trained"
        advice = "compute them from the prediction, without detach() or no_grad()"
        raise UsageError(where, what, advice)

    def losses(self, samples: Sequence[Sample], keys: Sequence[SampleKey]) -> Tensor:
        """Return one loss per sample, (batch,) fp32; all samples have the same inputs."""
        plan = self.plan(samples[0].inputs)
        loss_inputs: list[dict[str, Any]] = []
        for sample, key in zip(samples, keys, strict=True):
            values = self._run_units(sample, key, plan)
            loss_inputs.append({name: values[name] for name in plan.loss_inputs})
        # Dropout in model_fn's networks is drawn for the batch as a whole.
        seed_global(keys[0], "step")
        with about_rows([key.row for key in keys]):
            batch = collate(loss_inputs, self.pipeline.spec.padded, self.task.listed)
        return self._task_losses(batch, keys)

    def _run_units(self, sample: Sample, key: SampleKey, plan: Plan) -> dict[str, Any]:
        """Run the units of one sample; return the values."""
        is_ready = self.stage or sample.is_preprocessed
        if is_ready and not plan.train_steps:
            return self._on_device(sample.values)
        notice = partial(self.on_long_prompt, key)
        with about_rows([key.row]), noticing_long_prompts(notice):
            table = sample.values if is_ready else self.preprocess(sample, plan)
            values = self._on_device(table)
            if plan.train_steps:
                # Dropout in libraries draws from the global generator. Keyed by the
                # sample, it does not depend on which others are in its batch.
                seed_global(key, "units")
                self.pipeline.run(plan.train_steps, values, Rng([key]))
            return values

    def _on_device(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with their tensors, which are on the CPU, on the device."""
        device = self.pipeline.device
        if device.type == "cpu":
            return dict(values)
        moved: dict[str, Any] = send_to_device(dict(values), device, non_blocking=True)
        return moved

    @torch.no_grad()
    def preprocess(self, sample: Sample, plan: Plan) -> dict[str, Any]:
        """Run the cached steps of one sample; return the values that stage 1 stores."""
        inputs = self.pipeline.spec.inputs
        values = checked(inputs, sample.values, sized=inputs)
        check_measured(inputs, values)
        self.pipeline.run(plan.cached_steps, values)
        return {key: values[key] for key in plan.cached_values}

    def _task_losses(
        self, values: Mapping[str, Any], keys: Sequence[SampleKey]
    ) -> Tensor:
        loss = self.task.loss
        schedule = self.pipeline.spec.schedule
        constrain_latents = self.pipeline.constrain_latents(values)
        sampler = partial(integrate, schedule, constrain_latents)
        context = self.pipeline.bind_components(
            loss,
            timestep_sampler=self.timestep_sampler,
            loss_options=self.loss_options,
            constrain_latents=constrain_latents,
            sampler=sampler,
            inference_sigmas=partial(inference_sigmas, schedule),
            rng=Rng(keys),
        )
        inputs = {name: values[name] for name in loss.inputs if name in values}
        predict = partial(self.pipeline.predict, values)
        with read_only(loss.where, inputs):
            losses: Tensor = loss.function(predict, **inputs, **context)
        _check_losses(losses, len(keys), loss.where)
        return losses


def _check_losses(losses: object, samples: int, where: str) -> None:
    """Raise UsageError unless what a loss has returned is one per sample: multiplied by
    the samples' weights, another shape would be broadcast.
    """
    wanted = f"expected one loss per sample, of shape [{samples}]"
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(where, f"returned {kind}, not floats; {wanted}")
    if losses.shape != (samples,):
        what = f"returned losses of shape {list(losses.shape)}; {wanted}"
        advice = "leave the batch out of the mean: (error**2).flatten(1).mean(1)"
        raise UsageError(where, what, advice)


def _ignore(key: SampleKey, found: LongPrompt) -> None:
    """Cut a prompt without a word, as where no run asks."""


def keep_frozen_apart(module: TrainingModule) -> None:
    """Let `DistributedDataParallel` leave out what is frozen, which every process read
    from the same files: it would send it all at the start and buffers before each
    forward pass, and float8 gloo cannot send at all.
    """
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, frozen_names(module))


def frozen_names(module: TrainingModule) -> list[str]:
    """Return the names of a module's parameters that are not trained, and of the buffers
    of its networks that no step changes.
    """
    changing = {id(buffer) for buffer in module.trained_buffers.values()}
    parameters = (
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    )
    buffers = (
        f"networks.{name}"
        for name, buffer in module.networks.named_buffers(remove_duplicate=False)
        if id(buffer) not in changing
    )
    return [*chain(parameters, buffers)]
