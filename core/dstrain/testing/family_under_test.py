"""A variant at toy sizes: its model, its dataset, and the runs that tests make with
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

from dstrain.config.options import TrainConfig
from dstrain.distributed import ProcessGroup
from dstrain.graph import Column, PipelineSpec, Plan
from dstrain.models import ModelConfig, assign, write_toy
from dstrain.pipeline import Pipeline
from dstrain.pipeline.inference_plan import find_for_inference
from dstrain.randomness import SampleKey
from dstrain.registry import ModelFamily
from dstrain.runs import Setup, TrainingData, open_training_data, prepare
from dstrain.runs.resolve import resolve
from dstrain.testing.fingerprints import unit_values
from dstrain.testing.rows import write_rows
from dstrain.testing.trained_sets import TrainedSet
from dstrain.training import Sample, TrainingModule


class CachingModule(TrainingModule):
    """A module that runs the cached steps of a sample once, however many batches it is
    in.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.cached_samples: dict[int, tuple[Sample, dict[str, Any]]] = {}

    def preprocess(self, sample: Sample, plan: Plan) -> dict[str, Any]:
        """Return the cached values of a sample, computed at the first call for it."""
        if id(sample) not in self.cached_samples:
            self.cached_samples[id(sample)] = sample, super().preprocess(sample, plan)
        return dict(self.cached_samples[id(sample)][1])


@dataclass(frozen=True, eq=False)
class Run:
    """The module and the samples of a run that trains one set of trainables."""

    setup: Setup
    module: TrainingModule
    samples: TrainingData

    @cached_property
    def sample(self) -> Callable[[int], Sample]:
        """Return a function from a row to its sample, which is decoded or read from the
        cache once.
        """
        return cache(self.samples.source.sample)

    def cached_values(self, row: int) -> Mapping[str, Any]:
        """Return the values of one row that are cached between the stages."""
        sample = self.sample(row)
        return (
            sample.values
            if self.module.stage
            else self.module.preprocess(sample, self.module.plan(sample.inputs))
        )

    def batches(self, size: int) -> list[tuple[SampleKey, ...]]:
        """Return for each group the last `size` rows that may share a batch."""
        numbers = self.samples.groups.tolist()
        groups = (
            [row for row, own in enumerate(numbers) if own == group]
            for group in dict.fromkeys(numbers)
        )
        return [
            tuple(SampleKey(0, 0, 0, row) for row in group[-size:]) for group in groups
        ]

    def reached(self, network: nn.Module) -> list[str]:
        """Return the network's parameters to which some batch gives a gradient that is
        not zero.
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
        """Return one loss per sample, (batch,)."""
        return self.module.losses([self.sample(key.row) for key in keys], keys)


@dataclass(frozen=True, eq=False)
class FamilyUnderTest:
    """A variant that is tested; everything it writes lies below `folder`."""

    family: ModelFamily
    variant: str
    folder: Path

    @cached_property
    def models(self) -> tuple[ModelConfig, ...]:
        """Return the files of the toy model, written at first use."""
        return write_toy(self.family, self.variant, self.model)

    @property
    def model(self) -> Path:
        """Return the folder of the toy model."""
        return self.folder / "model"

    @cached_property
    def data(self) -> Path:
        """Return the folder of the dataset, written at first use."""
        return write_rows(self.spec, self.folder / "data")

    @cached_property
    def spec(self) -> PipelineSpec:
        """Return the variant's pipeline spec with the toy's constants."""
        return resolve(
            TrainConfig(model=self.family.name, variant=self.variant, toy=True)
        ).spec

    @cached_property
    def pipeline(self) -> Pipeline:
        """Return the inference pipeline, for tests that do not change it."""
        return self.open()

    @cached_property
    def values(self) -> dict[str, dict[str, Any]]:
        """Return the outputs of each unit, by the unit's name."""
        return unit_values(self.pipeline)

    def config(self, trained: TrainedSet, **flags: Any) -> TrainConfig:
        """Return the configuration of a run in fp32 on the CPU, which caches in `cache`
        and writes to `out`.
        """
        given = {
            "model": self.family.name,
            "variant": self.variant,
            "toy": True,
            "mixed_precision": "no",
            "dataset_base_path": self.data,
            "feature_cache": self.folder / "cache",
            "extra_inputs": ",".join(
                name
                for name, source in self.spec.inputs.items()
                if isinstance(source, Column) and source.optional
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
        """Resolve the configuration, with the toy's files or those given."""
        setup = resolve(self.config(trained, **flags))
        return replace(
            setup, models=tuple(models or self.models), device=torch.device("cpu")
        )

    def run(self, setup: Setup) -> Run:
        """Load what a run trains, with LoRA's second factors set to nonzero values, so
        that the first ones get gradients.
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
        """Return the inference pipeline in fp32 on the CPU, from the toy's files or
        those given.
        """
        found = find_for_inference(self.family, self.spec, models or self.models)
        return Pipeline.from_found(
            self.family, self.spec, found, torch.device("cpu"), torch.float32
        )

    @cached_property
    def files(self) -> Mapping[str, tuple[Path, ...]]:
        """Return the toy's weight files, by component."""
        known = self.family.load("components")
        wanted = [
            one.name
            for one in known
            if not one.is_folder and one.name in self.spec.components
        ]
        return {
            name: found.paths
            for name, found in assign(self.models, known, wanted).items()
        }

    def alone(
        self, components: Collection[str], place: Path
    ) -> tuple[ModelConfig, ...]:
        """Link the toy's folders of these components into a folder that holds nothing
        else.
        """
        place.mkdir()
        weights = {
            name: paths for name, paths in self.files.items() if name in components
        }
        folders = [
            one
            for one in self.family.load("components")
            if one.is_folder and one.name in components
        ]
        for folder in {
            *(paths[0].parent for paths in weights.values()),
            *(self.model / one.folders[0] for one in folders),
        }:
            (place / folder.name).symlink_to(folder)
        files = [
            [str(place / one.parent.name / one.name) for one in paths]
            for paths in weights.values()
        ]
        named = [
            ModelConfig(path=str(place / one.folders[0]), component=one.name)
            for one in folders
        ]
        return (*(ModelConfig(path=paths) for paths in files), *named)

    def with_file(self, component: str, path: Path) -> tuple[ModelConfig, ...]:
        """Return the toy's files with one component's replaced."""
        return tuple(
            ModelConfig(path=list(map(str, paths)))
            for paths in ({**self.files, component: (path,)}).values()
        )


@contextmanager
def gradients_enabled(network: nn.Module) -> Iterator[None]:
    """Let every parameter of a network require gradients meanwhile."""
    asked = [parameter.requires_grad for parameter in network.parameters()]
    network.requires_grad_(True)
    try:
        yield
    finally:
        network.zero_grad(set_to_none=True)
        for parameter, before in zip(network.parameters(), asked, strict=True):
            parameter.requires_grad_(before)


def processes() -> ProcessGroup:
    """Return a group of this process alone, on the CPU."""
    return ProcessGroup(Accelerator(cpu=True))
