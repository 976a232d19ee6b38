"""Errors read as one line and their help; an unknown name gets the one that is meant."""

import dstrain
import pytest
from dstrain import DstrainError, StateError, TrainConfig, UsageError
from dstrain.config import flags
from dstrain.errors import about_rows, nearest

FLAGS = tuple(flag.name for flag in flags(TrainConfig))
MEANT = {
    # slips of typing
    "batchsize": "batch_size",
    "batch-size": "batch_size",
    "bacth_size": "batch_size",
    "LoRA_rank": "lora_rank",
    "taks": "task",
    "use_gradient_checkpoiting": "use_gradient_checkpointing",
    # words left out, added or cut short
    "output": "output_path",
    "output_dir": "output_path",
    "rank": "lora_rank",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "num_train_epochs": "num_epochs",
    # the most similar name, though not the one that is meant
    "data_path": "dataset_repeat",
    "resume_from": "resume",
    "vae_path": "model_paths",
    "ema": "ema_decay",
    "timestep": "timestep_std",
    # nothing that is similar
    **dict.fromkeys(("use", "path", "token", "-", "zzz"), ""),
}


def meant(typed: str, known: tuple[str, ...]) -> str:
    """Return the name that is offered for another one, '' for none."""
    return "".join(nearest(typed, known).split("'")[1:2])


@pytest.mark.parametrize("typed", MEANT)
def test_a_mistyped_flag_gets_the_one_that_is_meant_or_none(typed: str) -> None:
    assert meant(typed, FLAGS) == MEANT[typed]


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_is_found_with_a_letter_lost_or_two_swapped(flag: str) -> None:
    lost, swapped = flag[:-1], flag[:1] + flag[2] + flag[1] + flag[3:]
    for typed in (lost, swapped, flag.replace("_", ""), flag.upper()):
        if typed == flag or typed not in FLAGS:
            found = meant(typed, FLAGS)
            assert found == flag or (len(flag) < 4 and not found), typed


def test_every_kind_of_error_has_a_code() -> None:
    found = [getattr(dstrain, name) for name in dstrain.__all__]
    kinds = [
        one for one in found if isinstance(one, type) and issubclass(one, DstrainError)
    ]
    assert {kind.__name__: kind.exit_code for kind in kinds} == {
        "DstrainError": 1,
        "UsageError": 2,
        "InputError": 2,
        "StateError": 3,
        "CacheError": 3,
        "MissingFiles": 3,
        "SystemFault": 4,
        "Diverged": 5,
        "OutOfMemory": 6,
        "Interrupted": 75,
    }


def test_an_error_reads_as_where_and_what_then_its_help() -> None:
    said = str(UsageError("--seed", "is blank", "give one"))
    assert said == "dstrain: error: --seed: is blank\n  give one"


def test_a_unit_error_gets_the_rows_it_is_about_and_then_their_places() -> None:
    with pytest.raises(UsageError) as caught, about_rows([3, 4]), about_rows([3, 1]):
        raise UsageError("unit f", "cannot", "do this")
    assert caught.value.rows == (3, 1)
    placed = caught.value.at(["a.csv:5", "a.csv:3"])
    assert placed.where == "a.csv:5, a.csv:3"
    assert (placed.what, placed.help_lines) == ("unit f: cannot", ("do this",))
    with pytest.raises(StateError) as other, about_rows([3]):
        raise StateError("a", "b")
    assert other.value.rows == ()
