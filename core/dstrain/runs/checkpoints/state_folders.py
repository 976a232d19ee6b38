"""The folders of states below an output folder, found by their names: nothing here imports
torch, so that a folder that is in the way is refused at once.
"""

import re
from pathlib import Path

FILES = ("trainable.safetensors", "optimizer.safetensors", "state.json")
EMA = "ema.safetensors"
"""The file of a state that only a run with an average has."""
RECORD = "record.json"
STATE_FILES = (RECORD, *FILES, EMA)
"""Every file that a state may have."""
STATES = "states"
NAME = re.compile(r"step-\d+")


def states(output: Path) -> list[Path]:
    """Return the state folders of an output folder, newest first, intact or not."""
    found = []
    for path in output.glob(f"{STATES}/*"):
        # A folder of this name without any of the files is not a state.
        has_files = any((path / name).exists() for name in STATE_FILES)
        if NAME.fullmatch(path.name) and has_files:
            found.append(path)
    return sorted(found, key=step_of, reverse=True)


def step_of(state: Path) -> int:
    """Return the step after which a state was saved."""
    return int(state.name.removeprefix("step-"))
