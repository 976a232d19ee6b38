"""The options of this package."""

import os
from pathlib import Path

from dstrain.plugin import converted, options


def as_folder(value: str | Path | None) -> Path | None:
    """Return a folder, None for none."""
    return None if value is None or value == "" else Path(value)


@options
class DatasetsOptions:
    """What is read beside files of this machine."""

    url_cache: Path | None = converted(
        "data",
        "Folder for files that the metadata names by URL. Without it, URLs are refused.",
        converter=as_folder,
        default=None,
    )

    @property
    def url_folder(self) -> Path | None:
        """Return the real path of `url_cache`."""
        return (
            None if self.url_cache is None else Path(os.path.realpath(self.url_cache))
        )
