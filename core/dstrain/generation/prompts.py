"""Say what happens to a prompt that is longer than the model takes."""

from dstrain.config.options import OnLongPrompt
from dstrain.console import get_logger
from dstrain.errors import UsageError
from dstrain.graph import LongPrompt

logger = get_logger(__name__)


def notice(mode: OnLongPrompt, where: str, found: LongPrompt) -> None:
    """Warn of a prompt that is cut, or raise UsageError, as --on_long_prompt says."""
    if mode == "error" and not found.usual:
        raise UsageError(
            where, str(found), "shorten it, or give --on_long_prompt truncate"
        )
    logger.warning(f"{where}: {found}")
