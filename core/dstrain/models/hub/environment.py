"""The folders, the hub and whether there are downloads at all, as environment variables say."""

import os
from pathlib import Path
from typing import get_args

from dstrain.config.options import Hub
from dstrain.errors import UsageError, nearest

MODEL_BASE_VARIABLES = ("DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH")
DATASET_BASE_VARIABLE = "DSTRAIN_DATASET_BASE_PATH"
HUB_VARIABLES = ("DSTRAIN_DOWNLOAD_SOURCE", "DIFFSYNTH_DOWNLOAD_SOURCE")
OFFLINE_VARIABLES = ("DSTRAIN_SKIP_DOWNLOAD", "DIFFSYNTH_SKIP_DOWNLOAD")


def model_base() -> Path:
    """Return the folder of published models, by default ./models."""
    for name in MODEL_BASE_VARIABLES:
        if os.environ.get(name):
            return Path(os.environ[name])
    return Path("models")


def dataset_base() -> Path:
    """Return the folder of published datasets, by default ./data."""
    return Path(os.environ.get(DATASET_BASE_VARIABLE) or "data")


def hub_of_environment() -> Hub | None:
    """Return the hub that an environment variable names, None if none does; raises
    UsageError for one that there is not.
    """
    hubs: dict[str, Hub] = {hub: hub for hub in get_args(Hub)}
    for name in HUB_VARIABLES:
        value = os.environ.get(name, "").strip().lower()
        if value in hubs:
            return hubs[value]
        if value:
            what = f"is {value!r}; expected one of {', '.join(hubs)}"
            raise UsageError(f"variable {name}", what + nearest(value, hubs))
    return None


def chosen_hub(hub: Hub | None) -> Hub:
    """Return the hub to download from: that of --hub, else of a variable, else the default."""
    return hub or hub_of_environment() or "modelscope"


def offline() -> str:
    """Return the environment variable that forbids every request, or ''."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            return name
    return ""
