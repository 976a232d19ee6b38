"""Datasets that hubs have, by their ids."""

import re
from pathlib import Path

from dstrain.plugin import Form, Given, UsageError, fetch_dataset

PLACE = re.compile(r"([^:@]+)(?:@([^:]+))?(?::(.+))?")
"""OWNER/NAME, OWNER/NAME@REVISION, either with :FOLDER behind it."""


class Published(Form):
    """A dataset on a hub: a folder of this machine once it was downloaded."""

    name = "published"
    reads = ("id",)

    def find(self, given: Given) -> Path | None:
        """Return the folder of a published dataset, downloaded unless it is here; None if
        it is not here, and nothing may be downloaded.
        """
        found = PLACE.fullmatch(str(given.path)) if given.is_id else None
        if found is None:
            return None
        dataset_id, revision, folder = found.groups(default="")
        if ".." in folder.split("/") or folder.startswith("/"):
            what = f"{folder!r} leads out of the dataset; expected a folder of it"
            raise UsageError(f"{given.option}_base_path", what)
        return fetch_dataset(dataset_id, revision, given.hub, folder, given.may_fetch)
