"""TrainingModule: a pipeline, a task and what is trained, as one nn.Module whose
forward returns the loss.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.graph.plan import Plan, make_plan
from dstrain.graph.schedule import TimestepSampler
from dstrain.graph.task import Task
from dstrain.lora.layers import Trainables
from dstrain.pipeline.pipeline import Pipeline
from dstrain.pipeline.sampling import integrate
from dstrain.randomness import Rng, SampleKey, seed_global
from dstrain.training.batch import Batch, Sample, moved
from dstrain.training.collate import collate
from dstrain.training.losses import SFT
from dstrain.training.trainables import TrainableModules, prepare_trainables


class TrainingModule(nn.Module):
    """Serves every family and task; subclass it and override `forward` or `losses` for
    another algorithm.

    Only what a training step uses is registered; encoders that are frozen stay in
    `pipeline.components`. stage: '' runs everything, 'train' expects samples that hold
    the values which crossed.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        task: Task = SFT,
        timestep_sampler: TimestepSampler | None = None,
        stage: str = "",
    ) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.task = task
        self.timestep_sampler = timestep_sampler or TimestepSampler(
            pipeline.spec.schedule
        )
        self.stage = stage
        self.trained = TrainableModules()
        self.networks = nn.ModuleDict()
        self._plans: dict[frozenset[str], Plan] = {}

    def switch_to_training_mode(self, trainables: Trainables, seed: int = 0) -> None:
        """Freeze everything, then make the named components or LoRA layers trainable
        and register what a step uses.
        """
        seed_global((seed,), "lora")
        self.trained = prepare_trainables(self.pipeline, trainables)
        self._plans.clear()

    def plan(self, inputs: frozenset[str]) -> Plan:
        """The plan for samples with these inputs present."""
        if inputs not in self._plans:
            plan = make_plan(
                self.pipeline.spec, inputs, self.task, self.trained.components
            )
            self._plans[inputs] = plan
            for name in plan.components["train"]:
                if isinstance(self.pipeline.components.get(name), nn.Module):
                    self.networks[name] = self.pipeline.components[name]
        return self._plans[inputs]

    def forward(self, batch: Batch) -> Tensor:
        """The batch's share of the global mean loss (scalar): sum of weight x loss /
        samples in the global batch.
        """
        weights = torch.tensor(batch.micro.weights)
        losses = self.losses(batch.samples, batch.micro.keys)
        return (losses * weights.to(losses.device)).sum() / batch.micro.total

    def losses(self, samples: Sequence[Sample], keys: Sequence[SampleKey]) -> Tensor:
        """One loss per sample, (batch,) fp32: frozen units without gradient, live units
        one by one, the task's loss.
        """
        plan = self.plan(samples[0].inputs)
        tables = [
            dict(sample.values) if self.stage else self.preprocess(sample, plan)
            for sample in samples
        ]
        seed_global(keys[0], "step")
        in_step: list[dict[str, Any]] = []
        for table, key in zip(tables, keys, strict=True):
            values = {
                name: moved(value, self.pipeline.device)
                for name, value in table.items()
            }
            self.pipeline.run(plan.train_steps, values, Rng([key]))
            in_step.append({name: values[name] for name in plan.loss_inputs})
        return self._loss(
            collate(in_step, self.pipeline.spec.padded, self.task.listed), keys
        )

    @torch.no_grad()
    def preprocess(self, sample: Sample, plan: Plan) -> dict[str, Any]:
        """Run the frozen units of one sample and keep what crosses: the same values
        that stage 1 stores.
        """
        table = dict(sample.values)
        self.pipeline.run(plan.cached_steps, table)
        return {key: table[key] for key in plan.cached_values}

    def _loss(self, values: Mapping[str, Any], keys: Sequence[SampleKey]) -> Tensor:
        def predict(
            noisy_latents: Tensor, timestep: Tensor, branch: str = "positive"
        ) -> Tensor:
            return self.pipeline.predict(values, noisy_latents, timestep, branch)

        loss, constrain_latents = (
            self.task.loss,
            self.pipeline.constrain_latents(values),
        )
        reads = {name: values[name] for name in loss.inputs if name in values}
        sampler = partial(integrate, self.pipeline.spec.schedule, constrain_latents)
        lent = self.pipeline.bind_components(
            loss,
            timestep_sampler=self.timestep_sampler,
            constrain_latents=constrain_latents,
            sampler=sampler,
            rng=Rng(keys),
        )
        losses: Tensor = loss.function(predict, **reads, **lent)
        return losses

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters an optimizer updates, in a fixed order."""
        return list(self.trained.parameters.values())
