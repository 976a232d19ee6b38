"""Errors read as one line and their help; a name that is not known gets the one that is
meant, or none.
"""

from email.message import EmailMessage

import pytest
from dstrain import DstrainError, StateError, TrainConfig, UsageError, errors
from dstrain.config import flags
from dstrain.errors import docs_address, nearest, with_addresses

FLAGS = tuple(flag.name for flag in flags(TrainConfig))
TYPOS: tuple[tuple[str, str], ...] = (
    # slips of typing
    ("batchsize", "batch_size"),
    ("batch-size", "batch_size"),
    ("bacth_size", "batch_size"),
    ("learning_rat", "learning_rate"),
    ("learningrate", "learning_rate"),
    ("LoRA_rank", "lora_rank"),
    ("seeds", "seed"),
    ("taks", "task"),
    ("hieght", "height"),
    ("model_path", "model_paths"),
    ("use_gradient_checkpoiting", "use_gradient_checkpointing"),
    # words left out, added or cut short
    ("output", "output_path"),
    ("output_dir", "output_path"),
    ("epochs", "num_epochs"),
    ("max_epochs", "num_epochs"),
    ("rank", "lora_rank"),
    ("alpha", "lora_alpha"),
    ("num_workers", "dataset_num_workers"),
    ("gradient_checkpointing", "use_gradient_checkpointing"),
    ("accumulation_steps", "gradient_accumulation_steps"),
    ("train_batch_size", "batch_size"),
    ("scheduler", "lr_scheduler"),
    ("warmup_steps", "lr_warmup_steps"),
    ("resume_checkpoint", "resume_from_checkpoint"),
    ("timestep", "timestep_sampling"),
    ("precision", "mixed_precision"),
    ("num_train_epochs", "num_epochs"),
    # the most similar name, though not the one that is meant
    ("data_path", "dataset_repeat"),
    ("resume_from", "resume"),
    ("lora", "lora_type"),
    ("vae_path", "model_paths"),
    ("ema", "ema_decay"),
    ("write", "overwrite"),
    # nothing that is similar
    ("resolutions", "resolution"),
    ("optimiser", "optimizer"),
    ("device", "device_memory"),
    ("size", "tile_size"),
    ("use", ""),
    ("path", ""),
    ("token", ""),
    ("dropout", "lora_dropout"),
    ("-", ""),
    ("zzz", ""),
)


@pytest.mark.parametrize(("typed", "meant"), TYPOS)
def test_a_mistyped_flag_gets_the_one_that_is_meant_or_none(
    typed: str, meant: str
) -> None:
    assert nearest(typed, FLAGS) == (f"; did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_is_found_with_a_letter_lost_or_two_swapped(flag: str) -> None:
    lost, swapped = flag[:-1], flag[:1] + flag[2] + flag[1] + flag[3:]
    for typed in (lost, swapped, flag.replace("_", ""), flag.upper()):
        if typed in FLAGS and typed != flag:
            continue
        assert nearest(typed, FLAGS) in (
            f"; did you mean {flag!r}?",
            "" if len(flag) < 4 else "!",
        ), typed


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("edti", ("base", "edit", "edit-2509"), "edit"),
        ("edit-2590", ("base", "edit", "edit-2509", "edit-2511"), "edit-2509"),
        ("trian", ("", "data_process", "train"), "train"),
        ("image_path", ("image", "prompt"), "image"),
        ("imgae", ("image", "prompt"), "image"),
        ("text", ("image", "prompt"), ""),
        ("tezt_encoder", ("dit", "text_encoder", "vae"), "text_encoder"),
        ("transformer", ("dit", "text_encoder", "vae"), ""),
        ("ditt", ("dit", "vae"), "dit"),
        ("komfy", ("diffusers", "comfyui", "kohya", "diffsynth"), "comfyui"),
        ("qwen", ("flux", "qwen_image", "wan"), "qwen_image"),
        ("edit-", ("base", "edit-2509-lightning", "edit-2511-lightning"), ""),
        ("", ("qwen_image",), ""),
        ("x", (), ""),
    ],
)
def test_other_names_are_matched_the_same_way(
    typed: str, known: tuple[str, ...], meant: str
) -> None:
    assert nearest(typed, known) == (f"; did you mean {meant!r}?" if meant else "")


def test_every_kind_of_error_has_a_code_of_its_own_and_says_what_it_is() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, DstrainError)
    ]
    own = [kind for kind in kinds if "exit_code" in vars(kind)]
    assert sorted(kind.exit_code for kind in own) == [1, 2, 3, 4, 5, 6, 75]
    parents = {kind: kind.__base__ for kind in kinds if kind not in own}
    assert parents == {
        errors.InputError: UsageError,
        errors.MissingFiles: errors.StateError,
        errors.CacheError: errors.StateError,
    }
    assert all(str(kind.__doc__).strip().endswith(".") for kind in kinds)


def test_an_error_reads_as_where_and_what_then_its_help() -> None:
    assert (
        str(UsageError("--seed", "is blank", "give one"))
        == "dstrain: error: --seed: is blank\n  give one"
    )


def test_a_unit_error_gets_the_rows_it_is_about_and_then_their_places() -> None:
    with pytest.raises(UsageError) as caught, errors.about_rows([3, 1]):
        raise UsageError("unit f", "cannot", "do this")
    assert caught.value.rows == (3, 1)
    placed = caught.value.at(["a.csv:5", "a.csv:3"])
    assert placed.where == "a.csv:5, a.csv:3"
    assert (placed.what, placed.help_lines) == ("unit f: cannot", ("do this",))
    with pytest.raises(StateError) as other, errors.about_rows([3]):
        raise StateError("a", "b")
    assert other.value.rows == ()


def test_a_dataset_is_named_in_errors_of_its_options_alone() -> None:
    with pytest.raises(UsageError) as caught, errors.about_dataset("--dataset 2"):
        raise UsageError("--crops", "cannot", "do this")
    assert caught.value.where == "--dataset 2: --crops"
    assert (caught.value.what, caught.value.help_lines) == ("cannot", ("do this",))
    for dataset, where in (("--dataset 2", "a.csv"), ("", "--crops")):
        with pytest.raises(UsageError) as caught, errors.about_dataset(dataset):
            raise UsageError(where, "cannot")
        assert caught.value.where == where


def test_the_first_who_knows_the_rows_is_right() -> None:
    with (
        pytest.raises(UsageError) as caught,
        errors.about_rows([3, 4]),
        errors.about_rows([4]),
    ):
        raise UsageError("unit f", "cannot")
    assert caught.value.rows == (4,)


@pytest.fixture
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package whose metadata has these addresses."""
    found = EmailMessage()
    for url in request.param:
        found["Project-URL"] = url
    monkeypatch.setattr(errors.metadata, "metadata", lambda name: found)
    docs_address.cache_clear()
    request.addfinalizer(docs_address.cache_clear)


HELP = "see docs/guide/datasets.md#which-samples-share-a-batch, docs/guide"


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    "address",
    [["Source, https://example.org/code", "Documentation, https://example.org/d/"]],
    indirect=True,
)
def test_a_page_in_a_message_gets_the_address_that_the_package_has() -> None:
    assert with_addresses(HELP) == (
        "see https://example.org/d/guide/datasets.html#which-samples-share-a-batch, docs/guide"
    )
    assert str(UsageError("a", "b", "docs/index.md")).endswith(
        "https://example.org/d/index.html"
    )


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("address", [[]], indirect=True)
def test_without_an_address_a_page_is_named_as_it_lies_in_the_project() -> None:
    assert with_addresses(HELP) == HELP
