"""`dstrain cache prune`: remove what no plan uses.

At every moment each value that a plan uses is in a committed shard: a plan that goes is
removed before its values; of a shard with values that stay, a new one with these is
committed before the old one is removed. Who is interrupted runs the command again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dstrain.cache.addresses import Numbers, as_text
from dstrain.cache.backend.index import check_is_cache, create_cache, temporary_files
from dstrain.cache.backend.plan_files import remove_unused, unused_columns
from dstrain.cache.commands.contents import Contents, PlanContents, rewrite_shard
from dstrain.cache.in_use import exclusive
from dstrain.cache.store import FeatureCache
from dstrain.config import as_size
from dstrain.console import number_of, printable, progress_bar
from dstrain.errors import UsageError, first_few, nearest


@dataclass(frozen=True)
class Pruning:
    """What goes."""

    contents: Contents
    plans: Sequence[PlanContents]
    values: Numbers
    leftovers: Sequence[Path]
    """Temporary files of runs that died, and columns of plans that they did not commit."""

    @property
    def lines(self) -> Iterator[str]:
        """Say what goes, a line for each kind of thing; nothing if nothing does."""
        for plan in self.plans:
            dataset = plan.stored.info.dataset
            rows = number_of(dataset["rows"], "row")
            what = f"{plan.stored.identity['family']}, {rows} of {dataset['path']}"
            yield f"plan {plan.stored.name}: {what}"
        if len(self.values):
            size = as_size(int(self.contents.nbytes[self.values].sum()))
            yield f"{number_of(len(self.values), 'value')} that no plan uses, {size}"
        if copies := int(self.contents.held.sum()) - len(self.contents.addresses):
            yield f"{number_of(copies, 'value')} that another shard has too"
        for path in self.leftovers:
            yield f"temporary file {path}"


def prune(
    folder: Path, names: Sequence[str], is_sure: bool, ask: Callable[[], bool] | None
) -> None:
    """Print what no plan uses and, if that is wanted, remove it.

    Args:
        names: Names of plans, or their beginnings: these go as well.
        is_sure: Whether to remove without asking.
        ask: Asks whether to remove what was printed; None where nobody can answer.

    Raises StateError for a folder that is no cache, or damaged, or in use where something
    is to be removed; UsageError for the name of no plan, or of several.
    """
    check_is_cache(folder)
    removes = is_sure or ask is not None
    with exclusive(folder) if removes else nullcontext():
        found = _find(Contents.of(folder), names)
        lines = list(found.lines)
        for line in lines:
            print(printable(line))
        if not lines:
            plans = first_few(plan.stored.name for plan in found.contents.plans)
            used = "; --plan NAME removes a plan, and what no other one uses: "
            more = f"{used}{plans}" if plans else ""
            print(f"{folder}: nothing to remove{more}")
        elif is_sure or (ask is not None and ask()):
            _remove(folder, found)
            print(f"{folder}: removed")
        else:
            removes = False
            print(f"{folder}: nothing was removed; add --yes to remove this")
        if removes:
            # Also where a run died after it had removed everything.
            FeatureCache.open(folder).write_index()


def _find(contents: Contents, names: Sequence[str]) -> Pruning:
    """Find what no plan uses; plans of these names count as gone."""
    plans = [named_plan(contents.plans, name) for name in names]
    stay = [one for one in contents.plans if one not in plans]
    unused = np.flatnonzero(~contents.used_by(stay))
    folder = contents.cache.folder
    leftovers = [*temporary_files(folder), *unused_columns(folder)]
    return Pruning(contents, plans, unused, leftovers)


def named_plan(plans: Collection[PlanContents], name: str) -> PlanContents:
    """Return the plan whose name begins so; raises UsageError for none or several."""
    known = {plan.stored.name: plan for plan in plans}
    found = [one for one in known if name and one.startswith(name)]
    if len(found) == 1:
        return known[found[0]]
    if found:
        what = f"{name!r} is the beginning of {len(found)} plans: {', '.join(found)}"
        raise UsageError("--plan", what)
    what = f"no plan named {name!r}; plans: {', '.join(known) or 'none'}"
    raise UsageError("--plan", what + nearest(name, known))


def _remove(folder: Path, found: Pruning) -> None:
    """Remove what was found; the caller holds the lock."""
    contents = found.contents
    create_cache(folder)
    # First: from here on no plan needs the values that go.
    for plan in found.plans:
        plan.stored.path.unlink()
    remove_unused(folder)
    stays = np.ones(len(contents.addresses), np.bool_)
    stays[found.values] = False
    shards = len(contents.shards)
    counts = np.bincount(contents.shard[stays], minlength=shards)
    sizes = np.bincount(contents.shard[stays], contents.nbytes[stays], minlength=shards)
    with progress_bar("prune", shards) as progress:
        # First the shards of which nothing stays, for two reasons. On a full disk they
        # make the space for those that are rewritten, of which the smallest follow.
        # And a value that two shards have stays in the first: rewritten with only
        # this value, it has the name of the second, which must be gone by then.
        for number in np.lexsort((sizes, counts > 0)):
            there = np.flatnonzero((contents.shard == number) & stays)
            if len(there) < contents.held[number]:
                kept = [as_text(one) for one in contents.addresses[there]]
                rewrite_shard(folder, contents.shards[number], kept)
            progress.update()
