"""What the numbers of a run depend on, as digests that its states have."""

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dstrain.config import dataset_flags, datasets_of, split_commas
from dstrain.config.datasets import ALPHA_MASK, MASK_COLUMN
from dstrain.config.options import (
    TrainConfig,
    ends_at_last_step,
    options_affecting,
    recorded_values,
)
from dstrain.data.tables import parse_columns
from dstrain.graph import MaskColumn
from dstrain.models import Config
from dstrain.models.device import ATTENTION
from dstrain.pipeline import MASK
from dstrain.runs.datasets.flags import other_masks
from dstrain.runs.setup import Setup
from dstrain.runs.training_data import TrainingData
from dstrain.runs.training_run import PlannedTraining, TrainingRun
from dstrain.storage import hash_json
from dstrain.training import CachedSamples

AnyRun = TrainingRun | PlannedTraining
PROCESSES = "processes"
"""Entry of the versions in a run's configuration: how many processes trained."""
MODIFIERS = "plugins that change steps"
"""Entry of these versions: what `modifiers_in_words` returns."""
NO_MODIFIERS = "none"
"""What `modifiers_in_words` returns where there are none."""
OF_MASKS = frozenset({MASK_COLUMN, ALPHA_MASK, "unmasked_weight"})
"""Options whose values `other_masks` has."""
STANDS_FOR = MappingProxyType(
    {
        "lr_scheduler_num_cycles": 1,
        "lr_scheduler_power": 1.0,
        "loraplus_lr_ratio": 1.0,
        "trainable_dtype": "fp32",
    }
)
"""Options of the optimizer -> the value of a run without them."""


def config_digest(run: AnyRun) -> str:
    """Return a digest of all that decides the numbers of a run.

    The split into stages, the number of processes and the place of files are not in it.
    """
    setup = run.setup
    config = setup.config
    columns = (config.extra_inputs, config.data_file_keys)
    numbers: list[Any] = [
        setup.mixed_precision,
        run.total_steps if ends_at_last_step(config.lr_scheduler) else None,
        {name: constant.value for name, constant in setup.spec.constants.items()},
        [[one.component, dict(one.entries)] for one in setup.models if one.entries],
        [setup.spec.variant, *(sorted(split_commas(names)) for names in columns)],
        {
            **recorded_values(config, "training"),
            **setup.objective,
            "learning_rate": setup.optimizer.rates.plain,
        },
    ]
    if optimizer := optimizer_identity(setup):
        numbers.append(optimizer)
    if ATTENTION in setup.versions:
        numbers.append({ATTENTION: setup.versions[ATTENTION]})
    # Stage 2 does not load what stage 1 encoded with.
    configs = {
        **(run.cache_info.configs if run.cache_info else {}),
        **run.found.configs,
    }
    kept = kept_identities(run, configs)
    numbers += [{name: one} for name, one in kept.items() if one is True]
    if config.column or config.default_caption is not None:
        numbers.append([parse_columns(config.column), config.default_caption])
    mask = setup.spec.inputs.get(MASK)
    if isinstance(mask, MaskColumn):
        # How much of it counts is one of the constants.
        numbers.append({"masks": [mask.name, mask.mode]})
        if others := other_masks(config):
            numbers.append({"masks of datasets": others})
    if own_options := other_options(config):
        numbers.append({"options of datasets": own_options})
    if setup.modifiers:
        numbers.append({"modify step": dict(setup.modifiers)})
    if setup.preset is not None:
        numbers.append([*setup.preset.components, setup.preset.digest])
    numbers += [{name: one} for name, one in kept.items() if one is not True]
    order: list[Any] = [run.order.groups.tolist(), run.order.samples_per_step]
    if run.data.parts:
        order.append([list(part) for part in run.data.parts])
    trainables = setup.trainables.identity
    return hash_json("run", [setup.task.name, trainables, order, numbers])


def kept_identities(run: AnyRun, configs: Mapping[str, Config]) -> dict[str, Any]:
    """Return what the numbers of a run depend on because of how its components are kept:
    the value of each component that it uses, by the name of the identity; True where it
    is that of all trained components and of no other.

    configs: The configurations of the components.
    """
    used = run.module.used_components
    found: dict[str, dict[str, Any]] = {}
    for component in sorted(used):
        for one in run.setup.keepers.identities(component, configs.get(component)):
            found.setdefault(one.name, {})[component] = one.value
    trained = dict.fromkeys(sorted(used & {*run.setup.trainables.components}), True)
    # As text, since 1 equals True.
    return {
        name: True if str(one) == str(trained) else one
        for name, one in sorted(found.items())
    }


def optimizer_identity(setup: Setup) -> dict[str, Any]:
    """Return what decides the optimizer's numbers, nothing where that is what states of
    runs before there was a choice have.
    """
    config = setup.config
    found: dict[str, Any] = {}
    if not setup.optimizer.is_default:
        found |= setup.optimizer.identity
    for name, default in STANDS_FOR.items():
        value = getattr(config, name)
        if value not in (None, default):
            found[name] = value
    return found


def modifiers_in_words(setup: Setup) -> str:
    """Return the plugins that change training after each step, with a part of the
    digest of their code.
    """
    words = [f"{name} (code {code[:8]})" for name, code in setup.modifiers.items()]
    return ", ".join(words) or NO_MODIFIERS


def other_options(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the datasets, by their names, some of whose options decide the numbers of a
    run and are not those of the run, with the values of these; without those of masks.
    """
    found: dict[str, dict[str, Any]] = {}
    run = _deciding_values(config)
    # Stage 2 need not name the dataset of --dataset_base_path, whose options are the run's.
    entries = replace(config, dataset_base_path=None)
    for one in datasets_of(entries) if config.dataset else ():
        other = {
            name: value
            for name, value in _deciding_values(one.config).items()
            if name not in OF_MASKS and value != run[name]
        }
        if other:
            found[one.name] = other
    return found


def _deciding_values(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a dataset that decide numbers, each as one of the ways in
    which it can be written.
    """
    deciding = options_affecting("training", "resolved")
    names = [name for name in dataset_flags() if name in deciding]
    values = {name: getattr(config, name) for name in names}
    columns = parse_columns(config.column)
    values["column"] = [f"{name}={columns[name]}" for name in sorted(columns)]
    return values


ROWS = "rows"
"""End of the entries of `data_fingerprint` that are no digests."""


def data_fingerprint(run: TrainingRun) -> dict[str, str]:
    """Return digests of the data: the metadata's bytes, and the sizes of the files it
    names.

    Sizes, because reading every image would cost more than it saves. Stage 2 has no
    files; the keys of its cached values say what these were computed from.
    """
    content = _content(run.data)
    if run.validation.data is not run.data:
        second = _content(run.validation.data)
        content |= {f"validation {name}": one for name, one in second.items()}
    return content


def _content(data: TrainingData) -> dict[str, str]:
    if data.cache_info is not None and isinstance(data.source, CachedSamples):
        return {
            "metadata": data.cache_info.dataset["sha256"],
            ROWS: str(data.cache_info.dataset["rows"]),
            "cached values of stage 1": data.source.rows.values_digest,
        }
    setup = data.setup
    sizes = []
    # The variants of a sample read the same files.
    for first in setup.dataset.first_variants:
        row = setup.dataset.rows[first]
        used = sorted(setup.plan(frozenset(row)).used_inputs)
        files = [file for name in used for file in row[name].files]
        sizes.append([os.path.getsize(file) for file in files])
    return {**_rows_of(setup), "files (by their sizes)": hash_json("sizes", sizes)}


def _rows_of(setup: Setup) -> dict[str, str]:
    return {
        "metadata": setup.dataset_digest,
        ROWS: str(len(setup.checked_dataset.table.rows)),
    }


def rows_fingerprint(setup: Setup) -> dict[str, str]:
    """Return what of `data_fingerprint` is known before stage 1 has computed anything."""
    content = _rows_of(setup)
    if setup.validation is not None:
        second = _rows_of(setup.validation)
        content |= {f"validation {name}": one for name, one in second.items()}
    return content
