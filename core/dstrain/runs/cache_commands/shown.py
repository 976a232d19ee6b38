"""What makes the samples of a plan visible: the decoders of its model, and the texts of
its dataset.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from dstrain.config import flags_by_name
from dstrain.config.fields import check_value
from dstrain.config.options import TrainConfig
from dstrain.data import CaptionOptions, Table
from dstrain.data.forms import Reading, parse_columns
from dstrain.data.row_samples import AS_WRITTEN
from dstrain.errors import UsageError
from dstrain.graph import Column, PipelineSpec
from dstrain.models import DTYPES, default_device, find, precision
from dstrain.models.naming import model_configs
from dstrain.pipeline import Pipeline, with_overrides
from dstrain.randomness import Rng, SampleKey
from dstrain.registry import ModelFamily, load_family, variant_of
from dstrain.runs.cache_commands.contents import PlanContents
from dstrain.runs.datasets.flags import caption_inputs, data_config
from dstrain.runs.datasets.sources import dataset_source

LATENTS = "input_latents"
"""The value that the losses take as the latents of a sample."""
RECORDED = (
    *("column", "default_caption", "caption_lines"),
    *("trigger_word", "caption_prefix", "caption_suffix"),
)
"""The recorded options that are used: they name no file. A stranger may have written them."""
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
        """Return a plan with the options that name a model and a dataset; opens nothing.

        Raises DstrainError for recorded options that are none, or a family that is not
        here.
        """
        recorded = plan.about.get("config", {})
        known = flags_by_name(TrainConfig)
        values = {name: recorded[name] for name in RECORDED if name in recorded}
        for name, value in values.items():
            if known[name].many:
                values[name] = tuple(value if isinstance(value, list) else [value])
            check_value(known[name], values[name])
        identity = plan.record["identity"]
        config = TrainConfig(model=identity["family"], **{**values, **named})
        family = load_family(config.model, config.disabled_plugins)
        variant = variant_of(family, identity["variant"])
        spec = with_overrides(family.spec(variant), family, config)
        return cls(plan, config, family, spec)

    def decoder(self) -> Decode:
        """Load the decoders of the variant; return a function that decodes a sample.

        Raises DstrainError where their files are not here, and for a plan without
        latents.
        """
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
        """Return a function that gives the texts of a row of the dataset.

        Raises UsageError where none is named, or another one than that of the plan.
        """
        config = self.config
        dataset = dataset_source(config)
        if dataset is None:
            raise UsageError("--dataset_base_path", "is not given")
        if dataset.digest() != self.plan.about["dataset"]["sha256"]:
            what = "is not what the plan was made from, or has changed"
            raise UsageError(dataset.path, what)
        columns = {
            name: one.name
            for name, one in self.spec.inputs.items()
            if isinstance(one, Column) and one.kind in ("text", "texts")
        }
        captions = caption_inputs(self.spec)
        reading = Reading(parse_columns(config.column), config.default_caption)
        table = reading.read(dataset, self.spec.inputs, [*columns.values()])
        own = data_config(config, self.spec).captions
        options = {
            column: own if name in captions else AS_WRITTEN
            for name, column in columns.items()
            if column in table.columns
        }
        return partial(_text, table, options)


def _text(table: Table, columns: Mapping[str, CaptionOptions], row: int) -> str:
    """Return the texts of a row as the model is given them, each on a line."""
    lines = []
    for name, options in columns.items():
        value = table.rows[row][name]
        if options == AS_WRITTEN:
            lines.append(str(value))
        else:
            lines += [caption for _, caption in options.captions(value)]
    return "\n".join(lines)
