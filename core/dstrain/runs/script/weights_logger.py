"""Save what a script trains to a folder."""

from pathlib import Path
from typing import Protocol

from dstrain.errors import StateError, UsageError
from dstrain.lora import format_named, save_lora_for
from dstrain.models import components_of
from dstrain.runs.checkpoints.component_weights import save_full
from dstrain.runs.script.parts import StepNumbers
from dstrain.training import TrainingModule


class TrainingLogger(Protocol):
    """What `launch_training_task` calls, in the main process alone."""

    def on_step_end(self, module: TrainingModule, numbers: StepNumbers) -> None:
        """Act after an optimizer step."""

    def on_epoch_end(self, module: TrainingModule, epoch: int) -> None:
        """Act after an epoch, the first of which is 0."""

    def on_training_end(self, module: TrainingModule, step: int) -> None:
        """Act after the last step."""


class WeightsLogger:
    """Saves what is trained to a folder, under the names that `run` gives its files."""

    def __init__(
        self,
        output_path: str | Path,
        save_steps: int | None = None,
        lora_format: str = "diffusers",
        overwrite: bool = False,
    ) -> None:
        """Save to a folder; raises StateError if there are weights in it already, and
        UsageError for another format, or another number of steps.

        Args:
            output_path: The folder.
            save_steps: Save every so many steps; by default, after each epoch.
            lora_format: The program whose key names are saved.
            overwrite: Whether files that are there may be replaced.
        """
        self.folder: Path = Path(output_path)
        self.save_steps = save_steps
        self.program: str = format_named(lora_format, "lora_format").name
        self.weights: tuple[Path, ...] = ()
        """The files saved last."""
        if save_steps is not None and save_steps < 1:
            raise UsageError("save_steps", f"expected 1 or more, got {save_steps}")
        there = sorted(self.folder.glob("*.safetensors"))
        if there and not overwrite:
            what = f"contains {there[0].name}, which was not modified"
            advice = "give another output_path, or overwrite=True"
            raise StateError(self.folder, what, advice)

    def on_step_end(self, module: TrainingModule, numbers: StepNumbers) -> None:
        """Save after every `save_steps` steps."""
        if self.save_steps is not None and numbers.step % self.save_steps == 0:
            self.save(module, f"step-{numbers.step}")

    def on_epoch_end(self, module: TrainingModule, epoch: int) -> None:
        """Save after each epoch, without `save_steps`."""
        if self.save_steps is None:
            self.save(module, f"epoch-{epoch}")

    def on_training_end(self, module: TrainingModule, step: int) -> None:
        """Save the last steps, if they are not."""
        if self.save_steps is not None and step % self.save_steps != 0:
            self.save(module, f"step-{step}")

    def save(self, module: TrainingModule, name: str) -> None:
        """Write one file for each component that is trained; raises SystemFault, and
        UsageError for a program that has no names for it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        components = module.trained.components
        names = [f"{name}.safetensors"]
        if len(components) > 1:
            names = [f"{name}.{component}.safetensors" for component in components]
        self.weights = tuple(self.folder / one for one in names)
        for component, path in zip(components, self.weights, strict=True):
            self._save(module, component, path)

    def _save(self, module: TrainingModule, component: str, path: Path) -> None:
        pipeline = module.pipeline
        family = pipeline.family
        header = {
            "family": pipeline.spec.family,
            "variant": pipeline.spec.variant,
            "component": component,
            "task": module.task.name,
        }
        network = pipeline.components[component]
        lora = module.trained.lora.get(component)
        if lora is not None:
            save_lora_for(self.program, path, network, lora, family, header)
            return
        config = pipeline.config_entries.get(component, {})
        known = components_of(family)[component]
        key_format = format_named(self.program).weights(known, family, config)
        if key_format is None:
            what = f"{self.program} has no key names for all of {component}"
            raise UsageError("lora_format", what)
        save_full(path, network, config, header, key_format)
