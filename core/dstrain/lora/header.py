"""Record what a LoRA was trained on in its file's header, and compare it with the model
in use.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from dstrain.console import get_logger
from dstrain.lora.stored import Lora
from dstrain.models import Files

logger = get_logger(__name__)
BLOCKS = 64
BLOCK_BYTES = 4096


def base_weights(files: Files) -> dict[str, str]:
    """Return the model id, if there is one, and the digest of the weights that a LoRA
    is trained on.
    """
    base = {"digest": sample_digest(files.paths)}
    if files.model_id:
        base["model_id"] = files.model_id
    return base


def sample_digest(paths: Sequence[Path]) -> str:
    """Return a digest of files, whatever their names, from the size and 64 blocks of 4
    KiB of each.

    That tells models apart, since further training changes every weight, and takes no
    time; it does not detect damage.
    """
    digests = []
    for path in paths:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(size - BLOCK_BYTES, 0) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:40]


def log_differences(lora: Lora, path: Path, variant: str, files: Files | None) -> None:
    """Log a warning for each thing that differs between a LoRA's training, as its header
    records it, and the model in use; their family is the same.
    """
    recorded = lora.header.get("variant", variant)
    if recorded != variant:
        logger.warning(f"{path}: was trained for variant {recorded}, not {variant}")
    try:
        base = json.loads(lora.header.get("base", "{}"))
        digest = base.get("digest")
        name = base.get("model_id", "other files")
    except (ValueError, AttributeError, RecursionError):
        return
    if digest and files is not None and digest != sample_digest(files.paths):
        used = files.model_id or files.paths[0].name
        other = f"other weights of {lora.component} ({name}), not on {used}"
        logger.warning(f"{path}: was trained on {other}")
