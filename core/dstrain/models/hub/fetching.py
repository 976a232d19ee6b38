"""Find published files where they are, and download those that are missing."""

import re
from pathlib import Path

from dstrain.config.options import Hub
from dstrain.errors import MissingFiles, UsageError
from dstrain.models.hub.clients import chosen_hub, offline
from dstrain.models.hub.download import Download
from dstrain.models.hub.model_source import ID, ModelSource, find_local
from dstrain.models.hub.record import described_shards, local_files

DESCRIPTION = re.compile(r"(?:^|/)(?:tokenizer_)?config\.json$")


def find_paths(source: ModelSource, pattern: str) -> list[Path]:
    """Return the files that a pattern means, from the first place that has all of them:
    the model's folder, the Hugging Face cache, a hub. Raises what `fetch` raises.
    """
    folder, names = source.folder, find_local(source, pattern)
    snapshot = None if names else source.snapshot
    if snapshot:
        names = local_files(snapshot, pattern)
        # Of a tokenizer, other programs may have fetched that alone.
        is_described = pattern.endswith("/") and all(map(DESCRIPTION.search, names))
        if source.missing_shards(names) or is_described:
            names = []
        folder = snapshot if names else folder
    names = names or fetch(source, pattern)
    return [folder / name for name in ([pattern] if pattern.endswith("/") else names)]


def _missing_error(source: ModelSource, pattern: str) -> MissingFiles:
    """Return the error of files that are missing, and why they are not downloaded."""
    what = "not all of its files are on this machine"
    shards = source.missing_shards(local_files(source.folder, pattern))
    if shards:
        what = described_shards(shards)
    if source.revision:
        what += f", or not at revision {source.revision}"
    advice = f"{source.kind}s are searched for in the folder that {source.base_variable} names"
    if offline():
        advice = f"nothing is downloaded because {offline()} is set; unset it"
    return MissingFiles(source.folder / pattern, what, advice)


def fetch(source: ModelSource, pattern: str) -> list[str]:
    """Return the files that a pattern means, as `find_local` does; download what is
    missing.

    Of several processes on a machine one downloads, and the others wait for it. Raises
    StateError if the hub has no such model, revision or file, or nothing may be
    downloaded; SystemFault if the hub or this machine fails.
    """
    names = find_local(source, pattern)
    if names:
        return names
    if source.hub is None or offline():
        raise _missing_error(source, pattern)
    # The id becomes a path, which must lie in the folder of models.
    if not re.fullmatch(ID, source.model_id):
        what = f"{source.model_id!r} is not a model id; expected OWNER/NAME"
        raise UsageError("--model_id_with_origin_paths", what)
    return Download(source, source.hub).run(pattern)


def fetch_dataset(
    dataset_id: str, revision: str, hub: Hub | None, folder: str, may_fetch: bool
) -> Path | None:
    """Return the folder of a published dataset, which is downloaded unless it is here;
    None if it is not here, and may not be. Raises as `fetch`. A revision or folder of ''
    is the hub's default, or all of it.
    """
    source = ModelSource(dataset_id, revision, chosen_hub(hub), "dataset")
    pattern = f"{folder.rstrip('/')}/" if folder else ""
    if not find_local(source, pattern):
        if not may_fetch:
            return None
        fetch(source, pattern)
    return source.folder / folder
