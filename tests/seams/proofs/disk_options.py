"""The option of the keeper that keeps weights on disk; help imports no torch."""

from dstrain.plugin import option, options


@options
class DiskOptions:
    """Where weights are."""

    on_disk: str | None = option(
        "memory",
        "Components whose weights are read from disk, in fp16, comma-separated.",
        affects={"resolved"},
    )
