"""A pipeline: a variant's wiring with the components that fill it. Training and inference run the same units."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain.components import Files
from dstrain.errors import UsageError
from dstrain.losses import Held, Hold
from dstrain.plan import POSITIVE, Step, value_key
from dstrain.randomness import Rng
from dstrain.record import ModelRecord
from dstrain.unit import Signature, component_of
from dstrain.wiring import Wiring


@dataclass
class Pipeline:
    """components: name -> module or tokenizer, for those loaded; configs: name -> configuration without weights.

    dtype: the dtype of components that are not trained; autocast: the dtype model_fn computes in, None for none.
    files: what components were loaded from.
    """

    wiring: Wiring
    record: ModelRecord
    components: dict[str, Any]
    configs: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    files: Mapping[str, Files] = field(default_factory=dict)

    @classmethod
    def from_pretrained(
        cls,
        family: str,
        model_configs: Sequence[Any],
        variant: str | None = None,
        device: torch.device | str | None = None,
        torch_dtype: torch.dtype = torch.float32,
    ) -> "Pipeline":
        """Load everything inference needs from `ModelConfig`s; the device is the GPU if there is one.

        Raises StateError for files that are missing or do not fit, UsageError for an unknown family or variant.
        """
        from dstrain.loading import open_pipeline

        return open_pipeline(family, model_configs, variant, device, torch_dtype)

    def load_lora(self, path: Path, scale: float = 1.0) -> None:
        """Add the layers of a LoRA file, times `scale`, to the component it was trained for; several add up."""
        from dstrain.loading import add_lora

        add_lora(self, path, scale)

    def lend(self, borrower: Signature, part: str = "", **ambient: Any) -> dict[str, Any]:
        """The names a function borrows, `ambient` ones as given; `part` is the expert that plays its role.

        Raises UsageError for a component that is not loaded.
        """
        ambient |= {"device": self.device, "dtype": self.dtype}
        expert = self.wiring.expert
        part = part or self._only_expert()
        lent = {}
        for name in borrower.borrows:
            played = name
            if expert and component_of(name) == expert.role:
                played = (part or (self._configured_expert() if name != expert.role else "")) + name[len(expert.role) :]
            lent[name] = ambient[name] if name in ambient else self._component(played, borrower)
        return lent

    def run(self, steps: Iterable[Step], values: dict[str, Any], rng: Rng | None = None) -> None:
        """Run units in order, adding what they make to the table of values."""
        for step in steps:
            reads = {name: values[key] for name, key in step.reads.items() if key in values}
            own = rng.scoped(f"{step.unit.name}.{step.side}") if rng is not None else None
            made = step.unit.run(reads, self.lend(step.unit, rng=own, side=step.side or POSITIVE))
            values.update({step.makes[name]: value for name, value in made.items()})

    def predict(self, values: Mapping[str, Any], noisy: Tensor, timestep: Tensor, side: str = POSITIVE) -> Tensor:
        """Call model_fn under autocast with the conditions of one side; returns the prediction, shaped as `noisy`.

        Where several experts are loaded, each predicts the samples whose timesteps are its own.
        """
        conditions = self._reads(self.wiring.model_fn, values, side)
        parts = self._experts(timestep)
        if len(set(parts)) == 1:
            return self._predict(parts[0], noisy, timestep, conditions, side)
        made: dict[int, Tensor] = {}
        for part in dict.fromkeys(parts):
            rows = [row for row, chosen in enumerate(parts) if chosen == part]
            given = {name: _rows(value, rows) for name, value in conditions.items()}
            made |= dict(zip(rows, self._predict(part, noisy[rows], timestep[rows], given, side), strict=True))
        return torch.stack([made[row] for row in range(len(parts))])

    def _predict(self, part: str, noisy: Tensor, timestep: Tensor, conditions: Mapping[str, Any], side: str) -> Tensor:
        model_fn = self.wiring.model_fn
        with torch.autocast(self.device.type, self.autocast) if self.autocast is not None else nullcontext():
            prediction: Tensor = model_fn.function(
                noisy, timestep, **conditions, **self.lend(model_fn, part, side=side)
            )
        return prediction

    def hold(self, values: Mapping[str, Any]) -> Hold:
        """The variant's `hold` with what it reads filled in; without one, nothing is held."""
        if self.wiring.hold is None:
            return _hold_nothing
        hold = self.wiring.hold
        return partial(hold.function, **self._reads(hold, values), **self.lend(hold))

    def __call__(self, **arguments: Any) -> Any:
        """Make a picture; see `dstrain.sampler.generate` for the arguments."""
        from dstrain.sampler import generate

        return generate(self, **arguments)

    def _reads(self, reader: Signature, values: Mapping[str, Any], side: str = POSITIVE) -> dict[str, Any]:
        keys = {name: value_key(self.wiring, name, side) for name in reader.reads}
        return {name: values[key] for name, key in keys.items() if key in values}

    def _experts(self, timestep: Tensor) -> list[str]:
        """The expert of each sample, one '' without experts; the noisiest part of a sample decides."""
        expert, only = self.wiring.expert, self._only_expert()
        if expert is None or only:
            return [only]
        return [expert.choose(one) for one in timestep.reshape(len(timestep), -1).amax(1).tolist()]

    def _only_expert(self) -> str:
        """The one expert that is loaded, else ''."""
        expert = self.wiring.expert
        loaded = [name for name in expert.components if name in self.components] if expert else []
        return loaded[0] if len(loaded) == 1 else ""

    def _configured_expert(self) -> str:
        """The first expert of which the configuration is known, else ''."""
        expert = self.wiring.expert
        return next((name for name in expert.components if name in self.configs), "") if expert else ""

    def _component(self, name: str, borrower: Signature) -> Any:
        if name in self.components:
            return self.components[name]
        if name.endswith("_config") and name.removesuffix("_config") in self.configs:
            return self.configs[name.removesuffix("_config")]
        loaded = ", ".join(self.components) or "none"
        raise UsageError(f"unit {borrower.name}", f"{name} is not loaded; loaded components: {loaded}")


def _rows(value: Any, rows: list[int]) -> Any:
    """Some samples of a collated value; what is not a tensor is the same for all."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, list):
        return [_rows(item, rows) for item in value]
    return {name: _rows(item, rows) for name, item in value.items()} if isinstance(value, dict) else value


def _hold_nothing(latents: Tensor, timestep: Tensor, noise: Tensor) -> Held:
    return Held(latents, timestep)
