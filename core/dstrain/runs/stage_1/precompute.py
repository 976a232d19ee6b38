"""Stage 1: run the cached steps once for each distinct input, and store the cached values
in the feature cache.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from dstrain.cache import FeatureCache, ShardWriter, is_cache, stored_plans
from dstrain.cache.backend.index import LOG, create_cache
from dstrain.cache.in_use import remove_dead_marks
from dstrain.config import command_line
from dstrain.config.serialize import command_words, new_start
from dstrain.console import get_logger, logging_to_file, redacted, secrets
from dstrain.distributed import ProcessGroup
from dstrain.errors import first_few, secret_error
from dstrain.models import component_at, components_of
from dstrain.models.needed_components import find_given
from dstrain.pipeline import Pipeline
from dstrain.runs.checks.rows import log_warnings
from dstrain.runs.datasets.sizes import group_sizes, size_lines
from dstrain.runs.datasets.sources import dataset_folders
from dstrain.runs.long_prompts import LongPromptLog, note_recorded
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import read_samples, write_list
from dstrain.runs.stage_1.before_stage_2 import check_resume, check_training
from dstrain.runs.stage_1.computing import compute, left_over
from dstrain.runs.stage_1.keyed_samples import KeyedSamples, key_rows
from dstrain.runs.stage_1.plan_writer import name_in, write_plan
from dstrain.runs.stage_1.unchanged import (
    Unchanged,
    find_unchanged,
    log_count,
    log_unchanged,
    may_be_unchanged,
    refuse_folder,
)
from dstrain.storage import BAD_SAMPLES, lock
from dstrain.storage.temporaries import nameable
from dstrain.training import collect_memory

logger = get_logger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A pipeline that computes values."""

    pipeline: Pipeline
    components: Mapping[str, str]
    """Component -> digest of what it was loaded from."""


def data_process(
    setup: Setup, processes: ProcessGroup, stage_2: Setup | None = None
) -> None:
    """Fill the feature cache with everything that the rows of the datasets need; what is
    there already is not computed again.

    stage_2: Stage 2, if the same command runs it next. What it needs is checked
        before anything is computed, and what was loaded is freed in the end.
    """
    found: list[Unchanged] = []
    with ExitStack() as stack:
        if processes.is_main:
            refuse_folder(setup)
            open_log = stack.enter_context(logging_to_file())
            found = _unchanged(setup, open_log)
        if may_be_unchanged(setup):
            # Without a limit of time: there may be a million files to look at.
            processes.wait()
            if processes.any(bool(found)):
                return
        read_samples(setup, processes)
        log_warnings(setup)
        for one in setup.datasets:
            refuse_secrets(one)
        if stage_2 is not None:
            module = check_training(
                stage_2,
                chain.from_iterable(one.dataset.input_sets for one in setup.datasets),
            )
            check_resume(setup, stage_2, processes, module)
            del module
        if processes.is_main:
            stack.enter_context(lock(setup.cache_path))
            create_cache(setup.cache_path)
            remove_dead_marks(setup.cache_path)
            open_log(setup.cache_path / LOG)
            # A damaged record is refused now, not when all is computed.
            stored_plans(setup.cache_path)
            write_list(setup)
        loaded = None
        words = _words_again(setup)
        for one in setup.datasets:
            loaded = fill(one, processes, loaded, words)
        _log_next(setup)
        if stage_2 is not None and loaded is not None:
            # The last reference: `fill` has returned.
            loaded = None
            collect_memory()
            logger.info("encoders freed")
        processes.wait()


def _unchanged(setup: Setup, open_log: Callable[[Path], None]) -> list[Unchanged]:
    """Return the datasets, and say what there is to say, if there is nothing to do."""
    folder = setup.cache_path
    if not may_be_unchanged(setup) or not is_cache(folder):
        return []
    with lock(folder):
        found = find_unchanged(setup)
        if found:
            create_cache(folder)
            # Where it is missing, or was damaged.
            FeatureCache.open(folder).write_index()
            remove_dead_marks(folder)
            open_log(folder / LOG)
            (setup.list_folder / BAD_SAMPLES).unlink(missing_ok=True)
            log_unchanged(found)
            _log_next(setup)
    return found


def _words_again(setup: Setup) -> list[str]:
    """Return the options of the command that fills the cache again, but for its folder."""
    words = command_words(
        setup.recorded,
        task=f"{setup.config.task_name}:data_process",
        feature_cache=None,
        output_path=None,
        **{name: getattr(setup.config, name) for name in setup.objective},
        **new_start(),
    )
    return [redacted(word) for word in words[1:]]


def fill(
    setup: Setup, processes: ProcessGroup, loaded: Loaded | None, words: Sequence[str]
) -> Loaded | None:
    """Fill the feature cache with the values of one dataset, and write its plan, which
    records the words of the command that makes it again.

    Returns what was loaded, if there was anything to compute: the next dataset needs the
    same, or components that only some rows use.
    """
    if processes.is_main:
        keyed = key_rows(setup)
        keyed.digests.save()
        keyed.model_digests.save()
    # The main process first: the digests that it remembers need not be read again.
    processes.wait()
    if not processes.is_main:
        keyed = key_rows(setup)
    cache = FeatureCache.open(setup.cache_path)
    long_prompts = LongPromptLog(setup.config.on_long_prompt, setup.name_row)
    if setup.config.on_long_prompt == "error":
        note_recorded(long_prompts, setup.cache_path, keyed.addresses())
    work = keyed.samples.missing_from(cache)
    log_count(setup, len(work), len(keyed.samples))
    # Of both stages in one command, stage 2 says it, with the batches.
    if not setup.is_one_of_both:
        for line in size_lines(group_sizes(setup.dataset), None):
            logger.info(line)
    if processes.size > 1 and work:
        # Dealt one by one: no process has more than one sample more than another.
        each = -(-len(work) // processes.size)
        logger.info(f"each of {processes.size} processes computes up to {each} of them")
    # Before anyone adds to the cache, so that all list, and divide, the same work.
    processes.wait()
    if work:
        writer = ShardWriter(cache, setup.versions)
        loaded = _load(setup, keyed, loaded, work.components)
        compute(setup, loaded.pipeline, work, writer, long_prompts, processes)
    processes.wait()
    if processes.is_main:
        left = None
        if processes.size > 1:
            left = left_over(keyed.samples, setup.cache_path)
        if left:
            writer = ShardWriter(FeatureCache.open(setup.cache_path), setup.versions)
            loaded = _load(setup, keyed, loaded, left.components)
            compute(setup, loaded.pipeline, left, writer, long_prompts, processes, True)
        # Also of rows that share a prompt, or whose values were there already.
        note_recorded(long_prompts, setup.cache_path, keyed.addresses())
        long_prompts.conclude()
        # Of the shards of all processes.
        FeatureCache.open(setup.cache_path).write_index()
        write_plan(setup, keyed, words)
    processes.wait()
    return loaded


def _load(
    setup: Setup, keyed: KeyedSamples, loaded: Loaded | None, names: Collection[str]
) -> Loaded:
    """Load the named components, unless just these were loaded: keys say from which files
    values are, and files may have been replaced since.
    """
    found = keyed.found
    files = {name: one for name, one in found.files.items() if name in names}
    if (
        loaded is None
        or found.configs.keys() - loaded.pipeline.configs.keys()
        or any(loaded.components.get(name) != keyed.components[name] for name in files)
    ):
        if files:
            logger.info(f"loading {', '.join(sorted(files))}")
        needed = replace(found, files=files)
        pipeline = Pipeline.from_found(
            setup.family, setup.spec, needed, setup.device, setup.dtype
        )
        digests = {name: keyed.components[name] for name in files}
        loaded = Loaded(pipeline, digests)
    for component in found.files.values():
        keyed.model_digests.check_unchanged(component.paths)
    return loaded


def _log_next(setup: Setup) -> None:
    """Say which command trains on the cache, unless this one does."""
    if setup.is_one_of_both:
        return
    config = setup.config
    output = config.output_path
    if output is None or config.feature_cache is None:
        # DiffSynth-Studio's commands fill the output folder.
        cache = nameable(setup.cache_path)
        output = cache.with_name(f"{cache.name}-trained")
    known = list(components_of(setup.family).values())
    names = setup.trainables.components
    named = {component_at(one, known) for one in setup.models if one.model_id}
    here = find_given(setup.family, setup.models, names, setup.spec.components).files
    lacking = [name for name in names if name not in {*named, *here}]
    whole: dict[str, Any] = {}
    models = {(one.model_id or "", one.revision) for one in setup.models}
    if lacking and len(models) == 1:
        # Stage 1 was given the encoders of a published model alone.
        ((model_id, revision),) = models
        if setup.spec.variant in setup.family.variants_of(model_id):
            name = f"{model_id}@{revision}" if revision else model_id
            whole = {"model_id": name, "model_id_with_origin_paths": None}
            lacking = []
    command = command_line(
        config,
        task=f"{config.task_name}:train",
        feature_cache=setup.cache_path,
        output_path=output,
        **whole,
    )
    files = f" with the files of {', '.join(lacking)}" if lacking else ""
    logger.info(f"to train on it, run{files}: {command}")


def refuse_secrets(setup: Setup) -> None:
    """Raise UsageError for rows with the value of a variable that is a secret: the cache
    would store it, and without it the row would be another.
    """
    dataset = setup.dataset
    folders = dataset_folders(setup.config)
    values = secrets()
    if not values:
        return
    found: dict[str, list[str]] = {variable: [] for variable in values.values()}
    for row, cells in zip(dataset.sample_ids[:, 0], dataset.rows, strict=True):
        for name, cell in cells.items():
            texts = [name_in(folders, file) for file in cell.files]
            texts.append(str(cell.literal))
            for value, variable in values.items():
                if any(value in text for text in texts):
                    found[variable].append(dataset.table.where(int(row), name))
    for variable, places in found.items():
        if places:
            raise secret_error(first_few(places), variable)
