"""The options that this package adds to `train`. Importing them imports no torch."""

from collections.abc import Iterable

from dstrain.plugin import TrainConfig, UsageError, converted, option, options

from dstrain_planner.sizes import parse_size


def _as_named(name: str | None) -> str | None:
    """Return the name of a recipe as recipes are named."""
    return name and name.lower().replace("_", "-")


def _names(beginning: str) -> Iterable[tuple[str, str]]:
    """Yield the recipes whose name begins so, each with its title."""
    from dstrain_planner.recipes.finding import recipes_named

    return recipes_named(beginning.lower().replace("_", "-"))


@options
class PlannerOptions:
    """What a dry run plans for, and the recipe that a run is of."""

    device_memory: str | None = option(
        "memory",
        "Memory of the GPU that --dry_run plans for, such as 24GB. Defaults to that of the GPU found.",
        affects={"start", "gpu"},
    )
    recipe: str | None = converted(
        "general",
        "Start from a ready configuration (`dstrain recipes` lists them). --config and the command line take "
        "precedence.",
        converter=_as_named,
        default=None,
        affects={"origin"},
        common=True,
        completes=_names,
    )

    def check(self, config: TrainConfig) -> None:
        """Refuse a size that is none or that plans nothing, and full training with what a
        recipe has for LoRA.
        """
        if self.device_memory is not None:
            parse_size("--device_memory", self.device_memory)
            if not config.dry_run:
                what = "has no effect without --dry_run, which says what fits"
                raise UsageError("--device_memory", what)
        if self.recipe is not None:
            from dstrain_planner.recipes.finding import refuse_full_training

            refuse_full_training(self.recipe, config)
