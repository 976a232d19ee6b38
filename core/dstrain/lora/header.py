"""What a LoRA file of ours says of how it was made, and what of that is another where
it is used.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrain.models.components import Files

BLOCKS, BLOCK_BYTES = 64, 4096


def base_weights(files: Files) -> dict[str, str]:
    """The weights that a LoRA was trained on: their model id, if they have one, and
    their digest.
    """
    return {
        **({"model_id": files.model_id} if files.model_id else {}),
        "digest": sample_digest(files.paths),
    }


def sample_digest(paths: Sequence[Path]) -> str:
    """A digest of files, whatever their names, that reads little of them: each one's
    size and 64 blocks of 4 KiB.

    It tells models apart, for in a model trained further every weight is another; it
    does not notice damage.
    """
    parts = []
    for path in paths:
        size = path.stat().st_size
        whole = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(size - BLOCK_BYTES, 0) // (BLOCKS - 1))
                whole.update(file.read(BLOCK_BYTES))
        parts.append(whole.hexdigest())
    return hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()[:40]


def training_differences(
    path: Path,
    header: Mapping[str, str],
    component: str,
    variant: str,
    files: Files | None,
) -> list[str]:
    """Lines on what a LoRA was trained for and on that is another in this pipeline; its
    family is the same.
    """
    lines = []
    recorded = header.get("variant", variant)
    if recorded != variant:
        lines.append(
            f"{path}: was trained for variant {recorded}, and this is {variant}"
        )
    try:
        base = json.loads(header.get("base", "{}"))
        digest, name = base.get("digest"), base.get("model_id", "other files")
    except (ValueError, AttributeError, RecursionError):
        digest, name = None, ""
    if (
        digest is not None
        and files is not None
        and digest != sample_digest(files.paths)
    ):
        here = files.model_id or files.paths[0].name
        lines.append(
            f"{path}: was trained on other weights of {component} ({name}) than these ({here})"
        )
    return lines
