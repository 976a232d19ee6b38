"""Replace a shard of a feature cache by one with only some of its values."""

from collections.abc import Collection, Mapping
from pathlib import Path

from dstrain.cache import FeatureCache, ShardWriter, read_shard


def rewrite_shard(folder: Path, path: Path, kept: Collection[str]) -> None:
    """Replace a shard by one with the values at these addresses, or by none if there are
    none; the caller holds the lock.

    The new one is committed before the old one is removed. Raises StateError if one of
    the values is damaged; nothing was removed then.
    """
    if path not in write_part(folder, path, kept, FeatureCache(folder)):
        path.unlink()


def write_part(
    folder: Path, path: Path, kept: Collection[str], target: FeatureCache
) -> list[Path]:
    """Write the values at these addresses of a shard to another cache, or to the same one;
    return its new shards.

    target: A cache that is open for writing and counts as empty, so that what it has is
        written again.
    """
    if not kept:
        return []
    reader = FeatureCache.of_shards(folder, [path])
    before = set(target.shards)
    writer = ShardWriter(target, recorded_about(path))
    for address in kept:
        writer.add(address, reader.read(address))
    # It maps the shard, which on Windows could then not be replaced by one of its name.
    del reader
    writer.flush()
    added = sorted(set(target.shards) - before)
    return [target.folder / "shards" / f"{name}.safetensors" for name in added]


def recorded_about(path: Path) -> Mapping[str, str]:
    """Return what a shard records of the run that wrote it."""
    return read_shard(path).about
