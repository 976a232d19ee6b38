"""Read single settings of a launcher from environment variables."""

import math
from collections.abc import Mapping

WHERE = "accelerate's configuration"
"""Where a setting is that an error is about."""
TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})


def switched_on(environment: Mapping[str, str], variable: str) -> bool:
    """Return whether a variable is set to one of the words that mean yes."""
    return environment.get(variable, "").strip().lower() in TRUE


def number(text: object) -> float:
    """Return a number that is written as text; NaN, which equals none, for anything else."""
    try:
        return float(str(text))
    except ValueError:
        return math.nan


def machine_size(environment: Mapping[str, str]) -> int:
    """Return how many of the processes run on this machine; all where it is not said."""
    size = number(environment.get("LOCAL_WORLD_SIZE", ""))
    return int(size) if size >= 1 else world_size(environment)


def world_size(environment: Mapping[str, str]) -> int:
    """Return how many processes the launcher started: torchrun's and accelerate's
    variable, or that of MPI; 1 without a launcher.
    """
    for variable in (
        "WORLD_SIZE",
        "PMI_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_SIZE",
    ):
        size = number(environment.get(variable, ""))
        if size >= 1:
            return int(size)
    return 1
