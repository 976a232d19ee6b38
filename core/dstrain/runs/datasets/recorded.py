"""What a plan of the feature cache records of each of several datasets, compared with
those that a run names: it may leave out that of --dataset_base_path.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.config import datasets_of
from dstrain.config.options import TrainConfig
from dstrain.data.forms import Source
from dstrain.runs.datasets.sources import OneHere, sources_of_parts


class NamedParts:
    """The datasets that a run names, as far as they are here."""

    def __init__(self, config: TrainConfig) -> None:
        """Find them; none where they are not several."""
        self._here: Sequence[OneHere] = (
            sources_of_parts(config) if config.dataset else ()
        )
        self._base = datasets_of(config)[0].config.dataset_base_path
        self._digests: dict[Source, str] = {}

    def first_changed(self, dataset: Mapping[str, Any]) -> Path | None:
        """Return where the first dataset is whose rows are not those that a plan records,
        or that it lacks; None if it has all, as far as they are here.

        Raises DstrainError for what cannot be read, and OSError.
        """
        recorded = dataset.get("parts", ({},))  # of a single one nothing is recorded
        if len(self._here) > len(recorded):
            return self._base
        # The last ones: that of --dataset_base_path is the first, and may be left out.
        for one, record in zip(self._here[::-1], recorded[::-1], strict=False):
            source = one.source
            # Plans of earlier versions have no digest of each.
            if source is None or "sha256" not in record:
                continue
            is_same_form = source.form == record.get("form", "table")
            if not (is_same_form or one.is_named or source.form == "table"):
                continue  # a table that is elsewhere
            if self._digest(source) != record["sha256"]:
                return source.path
        return None

    def _digest(self, source: Source) -> str:
        if source not in self._digests:
            self._digests[source] = source.digest()
        return self._digests[source]
