"""Options are read off the fields of a class, and their values are checked and parsed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from dstrain import UsageError
from dstrain.config import (
    Flag,
    LoraFile,
    NamedInput,
    flags,
    parse_alpha,
    parse_input,
    parse_lora,
    parse_model_paths,
    parse_origins,
    split_commas,
)
from dstrain.config.fields import changed, check_value, option


@dataclass(frozen=True, kw_only=True)
class Some:
    """A configuration with every kind of field."""

    name: str = field(
        metadata={"group": "model", "help": "Needed.", "affects": {"cache"}}
    )
    rank: int | None = option("general", "A number.", minimum=1, maximum=8)
    rate: float = option("general", "Another.", 0.5, above=0, below=2)
    mode: Literal["a", "bee"] = option("general", "One of two.", "a")
    paths: tuple[Path, ...] = option("general", "Several.", ())
    there: str | None = option("general", "Alone or not.", bare="auto")
    frames: int = option("data", "Video.", 2, affects={"video", "cache"})
    plain: int = 3


def flag(name: str) -> Flag:
    return next(flag for flag in flags(Some) if flag.name == name)


def test_every_field_with_a_description_is_an_option_in_its_order() -> None:
    names = [flag.name for flag in flags(Some)]
    assert names == ["name", "rank", "rate", "mode", "paths", "there", "frames"]


def test_type_default_and_choices_follow_from_the_field() -> None:
    assert flag("name") == Flag(
        "name", str, "model", "Needed.", affects={"cache"}, required=True
    )
    rank = flag("rank")
    assert (rank.kind, rank.default, rank.minimum, rank.maximum) == (int, None, 1, 8)
    assert (flag("rate").kind, flag("rate").default, flag("rate").above) == (
        float,
        0.5,
        0,
    )
    assert (flag("mode").kind, flag("mode").choices) == (str, ("a", "bee"))
    assert (flag("paths").kind, flag("paths").many) == (Path, True)
    assert flag("there").bare == "auto"


def test_changed_options_of_an_effect_are_those_not_at_their_default() -> None:
    some = Some(name="x")
    assert [flag.name for flag in changed(some, "cache")] == ["name"]
    assert not changed(some, "video")
    assert [flag.name for flag in changed(replace(some, frames=3), "video")] == [
        "frames"
    ]


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("name", None, "expected str, got None"),
        ("rank", 0, "expected 1 or more, got 0"),
        ("rank", 9, "expected 8 or less, got 9"),
        ("rank", True, "expected int, got True"),
        ("rank", 1.5, "expected int, got 1.5"),
        ("rate", 0, "expected more than 0, got 0"),
        ("rate", 2, "expected less than 2, got 2"),
        ("rate", math.inf, "expected a finite number, got inf"),
        ("mode", "be", "expected one of a, bee, got 'be'; did you mean 'bee'?"),
        ("paths", ("a",), "expected Path, got 'a'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(name: str, value: Any, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_value(flag(name), value)
    assert (caught.value.where, caught.value.what) == (f"--{name}", what)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", None),
        ("rank", 8),
        ("rate", 1),
        ("mode", "bee"),
        ("paths", (Path("a"),)),
    ],
)
def test_a_value_that_fits_is_accepted(name: str, value: Any) -> None:
    check_value(flag(name), value)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (split_commas, " to_q, to_k,,", ("to_q", "to_k")),
        (split_commas, None, ()),
        (parse_input, "edit-image=a=b", NamedInput("edit_image", "a=b")),
        (parse_alpha, "rank", "rank"),
        (parse_alpha, "4", 4.0),
    ],
)
def test_the_languages_of_values(
    parse: Callable[[Any], Any], text: str | None, value: object
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "where"),
    [
        (parse_input, "=x", "--input"),
        (parse_input, "x", "--input"),
        (parse_alpha, "0", "--alpha"),
        (parse_alpha, "x", "--alpha"),
    ],
)
def test_what_is_malformed_names_its_option(
    parse: Callable[[str], Any], text: str, where: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.where == where


def test_model_paths_are_groups_of_files() -> None:
    assert parse_model_paths('["a", ["b", "c"]]') == (("a",), ("b", "c"))
    assert parse_model_paths('"a"') == (("a",),)
    assert parse_model_paths(None) == ()
    for text in ("a.safetensors", '{"a": 1}', '""', "[1]", "[[]]", '[""]', "null"):
        with pytest.raises(UsageError, match="--model_paths"):
            parse_model_paths(text)


def test_a_folder_as_model_paths_is_told_the_flag_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    with pytest.raises(UsageError, match="a model is a folder, and files are") as told:
        parse_model_paths(str(folder))
    assert told.value.help_lines == (
        f"for all files of a model: --model_id '{folder}'",
    )
    with pytest.raises(UsageError, match="is not JSON"):
        parse_model_paths(str(tmp_path / "absent"))


def test_a_lora_file_is_written_as_it_can_be_typed() -> None:
    for text in ("a.safetensors", "a.safetensors:0.5@alpha=rank@skip_missing"):
        assert parse_lora(text).typed == text
    file = parse_lora("dit=a.safetensors:0.5").of(("dit",))
    assert file.typed == "dit=a.safetensors:0.5"


def test_origins_are_pairs_of_model_id_and_pattern() -> None:
    assert parse_origins("a/b:c/*.s, d/e:tokenizer/") == (
        ("a/b", "c/*.s", ""),
        ("d/e", "tokenizer/", ""),
    )
    assert parse_origins("a/b@v1:c:d,a/b:e") == (
        ("a/b", "c:d", "v1"),
        ("a/b", "e", "v1"),
    )
    with pytest.raises(UsageError, match="a/b is given with two revisions, v1 and v2"):
        parse_origins("a/b@v1:c,a/b@v2:c")
    for text in ("a/b", "a/b:", ":c", "a/b@:c"):
        with pytest.raises(UsageError, match="expected ID:PATTERN"):
            parse_origins(text)
    for pattern in ("/etc/x", "../b/c", "c/../../d"):
        with pytest.raises(UsageError, match="leads out of the model's folder"):
            parse_origins(f"a/b:{pattern}")


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.s", "a.s", 1.0),
        ("a.s:0.5", "a.s", 0.5),
        ("a:b.s", "a:b.s", 1.0),
        ("a:b.s:-1", "a:b.s", -1.0),
        ("a:nan", "a:nan", 1.0),
    ],
)
def test_a_lora_file_may_have_a_scale(text: str, path: str, scale: float) -> None:
    assert parse_lora(text) == LoraFile(Path(path), scale)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("a.s@alpha=rank", LoraFile(Path("a.s"), alpha="rank")),
        ("a.s:0.5@alpha=8", LoraFile(Path("a.s"), 0.5, alpha=8.0)),
        ("a.s@skip_missing", LoraFile(Path("a.s"), skip_missing=True)),
        (
            "a:b.s:2@skip_missing@alpha=0.5",
            LoraFile(Path("a:b.s"), 2.0, alpha=0.5, skip_missing=True),
        ),
        ("me@home.s", LoraFile(Path("me@home.s"))),
        ("a.s@skip", LoraFile(Path("a.s@skip"))),
        ("a@alpha=rank.s", LoraFile(Path("a@alpha=rank.s"))),
        ("a.s@alpha=rank:0.5", LoraFile(Path("a.s@alpha=rank"), 0.5)),
    ],
)
def test_what_stands_after_a_lora_file_is_an_option_only_if_it_is_known(
    text: str, file: LoraFile
) -> None:
    assert parse_lora(text) == file
    assert parse_lora(str(file)) == file


def test_an_option_of_a_lora_file_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="@alpha: expected a number above 0, or rank"):
        parse_lora("a.s@alpha=0")
    with pytest.raises(UsageError, match="@alpha: is given twice"):
        parse_lora("a.s@alpha=2@alpha=rank")


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("dit2=a.s:0.5", LoraFile(Path("a.s"), 0.5, "dit2")),
        ("dit=dit2=a.s", LoraFile(Path("dit2=a.s"), component="dit")),
        ("x/dit2=a.s", LoraFile(Path("x/dit2=a.s"))),
        ("dit3=a.s", LoraFile(Path("dit3=a.s"))),
        ("rank=8=a.s", LoraFile(Path("rank=8=a.s"))),
        ("dit2=", LoraFile(Path("dit2="))),
    ],
)
def test_only_a_components_name_before_the_first_equals_sign_names_one(
    text: str, file: LoraFile
) -> None:
    found = parse_lora(text).of(("dit", "dit2"))
    assert (found.component, found.scale) == (file.component, file.scale)
    assert found.path == file.path


def test_a_file_here_whose_name_begins_with_a_components_can_be_named() -> None:
    file = parse_lora("./dit=a.s:0.5@skip_missing").of(("dit",))
    wanted = LoraFile(Path("dit=a.s").absolute(), 0.5, skip_missing=True)
    assert file == parse_lora(str(file)).of(("dit",)) == wanted
    assert parse_lora("./x/dit=a.s").of(("dit",)).path == Path("x/dit=a.s")
    assert parse_lora("./").path == Path()


def test_what_decides_the_effect_of_a_lora_file_is_said() -> None:
    assert parse_lora("dit=a.s").of(("dit",)).changes == ""
    assert parse_lora("a.s:0.5@skip_missing@alpha=2").changes == (
        ":0.5@alpha=2.0@skip_missing"
    )
