"""The options that this package adds to `dstrain generate`; imports nothing that takes long."""

from pathlib import Path

from dstrain.plugin import GenerateConfig, UsageError, converted, option, options

EULER = "euler"
"""The sampler of trajectories. Written out here: core's constant is beside what imports torch."""


def _path(given: str | Path | None) -> Path | None:
    return given if given is None else Path(given)


@options
class TeacherOptions:
    """A dataset to generate, an image or a video for each row of a table."""

    dataset: Path | None = converted(
        "generation",
        "Table (csv, json or jsonl) of prompts, seeds and other inputs; generates a dataset from it.",
        converter=_path,
        default=None,
        commands=("generate",),
    )
    trajectory: bool = option(
        "generation",
        "With --dataset, store the latents that each row passes through as well, at its "
        "num_inference_steps, for --task trajectory_imitation.",
        False,
        commands=("generate",),
    )

    def check(self, config: GenerateConfig) -> None:
        """Raise UsageError for options that contradict each other."""
        if self.trajectory and self.dataset is None:
            raise UsageError("--trajectory", "has no effect without --dataset")
        if self.dataset is None or not isinstance(config, GenerateConfig):
            return
        if config.overwrite:
            what = "has no effect with --dataset, which keeps the files that are there"
            raise UsageError("--overwrite", what)
        if self.trajectory and config.denoising_strength is not None:
            what = "has trajectories start in their middle; a student learns whole ones"
            raise UsageError("--denoising_strength", what, "leave out --trajectory")
        if self.trajectory and config.sampler not in (None, EULER):
            what = "is not straight between its steps, as trajectories are"
            raise UsageError("--sampler", what, "leave it out, or give euler")
        for name, value in (("prompt", config.prompt), ("seed", config.seed)):
            if value:
                what = f"cannot be combined with --dataset, whose column {name!r} has one for each row"
                raise UsageError(f"--{name}", what)

    def takes_generate(self) -> str:
        """Return what generates in the place of dstrain, if a table is given."""
        module = "dstrain_tools.teacher.dataset"
        return f"{module}:generate_dataset" if self.dataset is not None else ""
