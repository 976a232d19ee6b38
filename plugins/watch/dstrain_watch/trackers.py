"""The trackers that there are, and how each of them is made. Imports no torch."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

TRACKERS = (
    "tensorboard",
    "wandb",
    "swanlab",
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "trackio",
)
"""The trackers that accelerate knows, by the names of their libraries."""
FINISH_SECONDS = 300
"""How long Weights & Biases may send what is left when the run ends."""
NO_METADATA = MappingProxyType(
    {"metadata_collect": False, "requirements_collect": False, "log_proxy_type": "none"}
)
"""SwanLab's settings by which it sends neither the command line nor what is printed."""


def made(name: str, project: str, folder: Path, run_id: str, step: int) -> Any:
    """Return a tracker of accelerate's, not started."""
    from accelerate import tracking

    place = folder / "logs" / name
    place.mkdir(parents=True, exist_ok=True)
    if name == "tensorboard":
        # What a run that was cut off logged after this step is not shown.
        return tracking.TensorBoardTracker(
            run_id, place, purge_step=step + 1 if step else None
        )
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    own: dict[str, Any] = {"id": run_id, "resume": "allow"}
    if name == "wandb":
        own |= {"dir": str(place), "settings": _wandb_settings()}
    elif name == "swanlab":
        own |= {"logdir": str(place), "settings": _swanlab_settings()}
    else:
        own = {"logging_dir": str(place)} if kind.requires_logging_directory else {}
    return kind(project, **own)


def _wandb_settings() -> Any:
    """Return settings by which neither the command line, the environment nor what is
    printed is sent, and a network that is gone does not hold the end of a run.
    """
    import wandb

    return wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_meta=True,
        finish_timeout=FINISH_SECONDS,
    )


def _swanlab_settings() -> Any:
    """Return settings by which neither the command line nor what is printed is sent.

    Raises RuntimeError for a version that does not take them.
    """
    import swanlab

    if hasattr(swanlab.Settings, "Probe"):
        # 0.10 groups them; whatever another version's probe collects is named, too.
        given = {
            name: False
            for name in swanlab.Settings.Probe.model_fields
            if not name.startswith("monitor_")
        }
        settings = swanlab.Settings(probe=given, terminal={"proxy_type": "none"})
        found = (getattr(settings.probe, name) for name in given)
        is_quiet = not any(found) and settings.terminal.proxy_type == "none"
    else:
        settings = swanlab.Settings(**NO_METADATA)
        is_quiet = all(
            getattr(settings, name, None) == one for name, one in NO_METADATA.items()
        )
    if not is_quiet:
        raise RuntimeError(
            "this version of swanlab has other settings, and might send secrets"
        )
    return settings
