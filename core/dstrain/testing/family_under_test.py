"""One variant at toy sizes: its model, its data set, and the runs that tests make of
them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dstrain.config.schema import TrainConfig
from dstrain.distributed.world import ProcessGroup
from dstrain.graph.inputs import Column
from dstrain.graph.plan import Plan
from dstrain.graph.spec import PipelineSpec
from dstrain.models.locate import ModelConfig, assign
from dstrain.models.toy import write_toy
from dstrain.pipeline.pipeline import Pipeline
from dstrain.randomness import SampleKey
from dstrain.registry.family import ModelFamily
from dstrain.runs.build import open_training_data, prepare
from dstrain.runs.job import TrainingData
from dstrain.runs.resolve import resolve
from dstrain.runs.setup import Setup
from dstrain.testing.fingerprints import unit_values
from dstrain.testing.rows import write_rows
from dstrain.testing.trained_sets import TrainedSet
from dstrain.training.batch import Sample
from dstrain.training.module import TrainingModule


class CachingModule(TrainingModule):
    """A module that runs the frozen units of a sample once, however many batches it is
    in.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.cached_samples: dict[int, tuple[Sample, dict[str, Any]]] = {}

    def preprocess(self, sample: Sample, plan: Plan) -> dict[str, Any]:
        """What crosses, computed at the first call for this very sample."""
        if id(sample) not in self.cached_samples:
            self.cached_samples[id(sample)] = sample, super().preprocess(sample, plan)
        return dict(self.cached_samples[id(sample)][1])


@dataclass(frozen=True, eq=False)
class Run:
    """What a run of one set of trainables trains: its module, its samples, and what it
    was told.
    """

    setup: Setup
    module: TrainingModule
    samples: TrainingData

    @cached_property
    def sample(self) -> Callable[[int], Sample]:
        """Row -> its sample, decoded from the data set or read from the feature store
        once.
        """
        return cache(self.samples.source.sample)

    def cached_values(self, row: int) -> Mapping[str, Any]:
        """The values of one row that cross between the stages."""
        sample = self.sample(row)
        return (
            sample.values
            if self.module.stage
            else self.module.preprocess(sample, self.module.plan(sample.inputs))
        )

    def batches(self, size: int) -> list[tuple[SampleKey, ...]]:
        """The last rows that may share a batch, `size` of them, for each of their
        signatures.
        """
        rows = range(len(self.samples.groups))
        groups = (
            [row for row in rows if self.samples.groups[row] == group]
            for group in set(self.samples.groups)
        )
        return [
            tuple(SampleKey(0, 0, 0, row) for row in group[-size:]) for group in groups
        ]

    def reached(self, network: nn.Module) -> list[str]:
        """Names of the network's parameters to which some batch gives a gradient that
        is not zero.
        """
        network.zero_grad(set_to_none=True)
        for keys in self.batches(2):
            torch.autograd.backward(self.losses(keys).sum())
        return [
            name
            for name, value in network.named_parameters()
            if value.grad is not None and value.grad.any()
        ]

    def losses(self, keys: Sequence[SampleKey]) -> torch.Tensor:
        """One loss per sample, (batch,)."""
        return self.module.losses([self.sample(key.row) for key in keys], keys)


@dataclass(frozen=True, eq=False)
class FamilyUnderTest:
    """A variant that is tested; everything it writes lies below `folder`."""

    family: ModelFamily
    variant: str
    folder: Path

    @cached_property
    def models(self) -> tuple[ModelConfig, ...]:
        """The files of the toy model, written at the first use."""
        return write_toy(self.family, self.variant, self.model)

    @property
    def model(self) -> Path:
        """The folder of the toy model."""
        return self.folder / "model"

    @cached_property
    def data(self) -> Path:
        """The folder of the data set, written at the first use."""
        return write_rows(self.spec, self.folder / "data")

    @cached_property
    def spec(self) -> PipelineSpec:
        """The variant's pipeline spec with the toy's settings."""
        return resolve(
            TrainConfig(model=self.family.name, variant=self.variant, toy=True)
        ).spec

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline of inference, for tests that leave it as it is."""
        return self.open()

    @cached_property
    def values(self) -> dict[str, dict[str, Any]]:
        """Unit -> what it makes."""
        return unit_values(self.pipeline)

    def config(self, trained: TrainedSet, **flags: Any) -> TrainConfig:
        """What a run of these trainables on the CPU in fp32 is told; it stores features
        in `cache`, writes `out`.
        """
        given = {
            "model": self.family.name,
            "variant": self.variant,
            "toy": True,
            "mixed_precision": "no",
            "dataset_base_path": self.data,
            "feature_cache": self.folder / "cache",
            "extra_inputs": ",".join(
                n
                for n, s in self.spec.inputs.items()
                if isinstance(s, Column) and s.optional
            ),
            "output_path": self.folder / "out",
            **trained.flags,
        }
        return TrainConfig(**{**given, **flags})

    def setup(
        self,
        trained: TrainedSet,
        models: Sequence[ModelConfig] | None = None,
        **flags: Any,
    ) -> Setup:
        """The configuration resolved, with the toy's files or those given."""
        setup = resolve(self.config(trained, **flags))
        return replace(
            setup, models=tuple(models or self.models), device=torch.device("cpu")
        )

    def run(self, setup: Setup) -> Run:
        """Load what a run trains; LoRA's second factors are not zero, so that the first
        ones have gradients.
        """
        samples = open_training_data(setup)
        module = prepare(setup, processes(), samples, CachingModule).module
        with torch.no_grad():
            for name, parameter in module.trained.parameters.items():
                if "lora_B" in name:
                    parameter.copy_(
                        torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter)
                    )
        return Run(setup, module, samples)

    def open(self, models: Sequence[ModelConfig] | None = None) -> Pipeline:
        """The pipeline of inference on the CPU in fp32, from the toy's files or those
        given.
        """
        return Pipeline.from_files(
            self.family, self.spec, models or self.models, "cpu", torch.float32
        )

    @cached_property
    def files(self) -> Mapping[str, tuple[Path, ...]]:
        """Component with weights -> the toy's files of it."""
        known = self.family.load("components")
        wanted = [
            c.name for c in known if not c.is_folder and c.name in self.spec.components
        ]
        return {
            name: found.paths
            for name, found in assign(self.models, known, wanted).items()
        }

    def alone(
        self, components: Collection[str], place: Path
    ) -> tuple[ModelConfig, ...]:
        """The toy's folders of these components, linked to from a place where there is
        nothing else.
        """
        place.mkdir()
        weights = {
            name: paths for name, paths in self.files.items() if name in components
        }
        folders = [
            c
            for c in self.family.load("components")
            if c.is_folder and c.name in components
        ]
        for folder in {
            *(paths[0].parent for paths in weights.values()),
            *(self.model / c.folders[0] for c in folders),
        }:
            (place / folder.name).symlink_to(folder)
        files = [
            [str(place / one.parent.name / one.name) for one in paths]
            for paths in weights.values()
        ]
        named = [
            ModelConfig(path=str(place / c.folders[0]), component=c.name)
            for c in folders
        ]
        return (*(ModelConfig(path=paths) for paths in files), *named)

    def with_file(self, component: str, path: Path) -> tuple[ModelConfig, ...]:
        """The toy's files with one component's replaced."""
        return tuple(
            ModelConfig(path=list(map(str, paths)))
            for paths in ({**self.files, component: (path,)}).values()
        )


@contextmanager
def gradients_enabled(network: nn.Module) -> Iterator[None]:
    """While this lasts, every parameter of a network asks for a gradient."""
    asked = [parameter.requires_grad for parameter in network.parameters()]
    network.requires_grad_(True)
    try:
        yield
    finally:
        network.zero_grad(set_to_none=True)
        for parameter, before in zip(network.parameters(), asked, strict=True):
            parameter.requires_grad_(before)


def processes() -> ProcessGroup:
    """This process alone, on the CPU."""
    return ProcessGroup(Accelerator(cpu=True))
