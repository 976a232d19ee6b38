"""What makes the samples of a plan visible: the decoders of its model, and the texts of
its dataset. Nothing is opened because a plan, which a stranger may have written, names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dstrain.cache import PlanContents
from dstrain.config.options import TrainConfig
from dstrain.data.tables import Reading, find_source, installed_forms
from dstrain.errors import UsageError
from dstrain.graph import Column, PipelineSpec
from dstrain.models import DTYPES, default_device, find, precision
from dstrain.models.naming import model_configs
from dstrain.pipeline import Pipeline, with_overrides
from dstrain.randomness import Rng, SampleKey
from dstrain.registry import ModelFamily, load_family, variant_of

LATENTS = "input_latents"
"""The value that the losses take as the latents of a sample."""
Decode = Callable[[Mapping[str, Any]], Any]
"""The values of a sample -> its image or video."""


@dataclass(frozen=True)
class ShownPlan:
    """A plan with the model and the dataset that a user names for it."""

    plan: PlanContents
    config: TrainConfig
    family: ModelFamily
    spec: PipelineSpec

    @classmethod
    def of(cls, plan: PlanContents, named: Mapping[str, Any]) -> "ShownPlan":
        """Return a plan with these options; opens nothing. Raises DstrainError."""
        identity = plan.stored.identity
        config = TrainConfig(model=identity["family"], **named)
        family = load_family(config.model, config.disabled_plugins)
        variant = variant_of(family, identity["variant"])
        spec = with_overrides(family.spec(variant), family, config)
        return cls(plan, config, family, spec)

    def decoder(self) -> Decode:
        """Load the decoders; return a function that decodes a sample. Raises DstrainError."""
        if LATENTS not in self.plan.values:
            raise UsageError("plan", f"has no {LATENTS} to decode")
        spec = self.spec
        asked = [name for one in spec.decoders for name in one.components]
        names = [name for name in spec.components if name in asked]
        models = model_configs(self.config, self.family)
        found = find(self.family, models, names, (), spec.components)
        device = default_device()
        dtype = DTYPES[precision(None, device)]
        pipeline = Pipeline.from_found(self.family, spec, found, device, dtype)
        constants = {name: one.value for name, one in spec.constants.items()}
        others = {**spec.defaults, **constants}

        def decode(values: Mapping[str, Any]) -> Any:
            latents: Tensor = values[LATENTS]
            rng = Rng([SampleKey(0, 0, 0, 0)])
            return pipeline.decode(latents.to(device), {**others, **values}, rng)

        return decode

    def texts(self) -> Callable[[int], str]:
        """Return a function that gives the texts of a row as the dataset has them.

        Raises UsageError where none is named, or another one than that of the plan.
        """
        config = self.config
        if config.dataset_base_path is None:
            raise UsageError("--dataset_base_path", "is not given")
        base, metadata = config.dataset_base_path, config.dataset_metadata_path
        dataset = find_source(base, metadata, forms=installed_forms(config))
        if dataset.digest() != self.plan.stored.info.dataset["sha256"]:
            what = "is not what the plan was made from, or has changed"
            raise UsageError(dataset.path, what)
        names = [
            one.name
            for one in self.spec.inputs.values()
            if isinstance(one, Column) and one.kind in ("text", "texts")
        ]
        table = Reading({}).read(dataset, self.spec.inputs, names)
        columns = [name for name in names if name in table.columns]
        return lambda row: "\n".join(str(table.rows[row][name]) for name in columns)
