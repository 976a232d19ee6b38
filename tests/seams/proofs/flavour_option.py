"""An option that is part of what is cached, and of what a run is compared by."""

from typing import Literal

from dstrain.plugin import TrainConfig, UsageError, option, options


@options
class FlavourOptions:
    """How values taste."""

    flavour: Literal["plain", "mint", "lemon"] = option(
        "data", "What values taste of.", "plain", affects={"cache", "training"}
    )

    def check(self, config: TrainConfig) -> None:
        if self.flavour == "lemon" and config.batch_size > 1:
            raise UsageError("--flavour", "lemon is for one sample at a time")
