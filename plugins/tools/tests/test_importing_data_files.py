"""What TOML and YAML files of other tools say, where it is not what it seems."""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain_tools.importing.entries import Result
from dstrain_tools.importing.models import model_of
from dstrain_tools.importing.reading.source import read_source
from dstrain_tools.importing.tables import table_of
from dstrain_tools.importing.translation import Translation, translate

JOB = "config: {process: [{model: {name_or_path: black-forest-labs/FLUX.1-dev}, %s}]}"
SCRIPT = "python qwen_image_train_network.py --network_module networks.lora_qwen_image"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


def translated(name: str, text: str) -> Translation:
    """What a file is here."""
    Path(name).write_text(text)
    source = read_source(Path(name), None, None, None)
    table = table_of(source.tool)
    model = model_of(source, table, None)
    return translate(source, table, model, Path("run.toml"))


def result(found: Translation, key: str) -> Result:
    """What becomes of a key."""
    (one,) = [one.result for one in found.outcomes if one.entry.key == key]
    return one


def test_a_value_that_contains_itself_is_refused() -> None:
    Path("a.yaml").write_text("config: &a {process: [*a]}\n")
    with pytest.raises(UsageError, match="a value contains itself"):
        read_source(Path("a.yaml"), None, None, None)


def test_a_value_that_stands_in_two_places_is_none_of_itself() -> None:
    job = JOB % "train: &a {steps: 5}, sample: {<<: *a}, save: *a"
    assert translated("a.yaml", job).run["max_steps"].value == 5


@pytest.mark.parametrize(
    ("network", "rank"), (("null", None), ("{}", 4), ("{linear: 8}", 8))
)
def test_a_network_that_is_null_trains_the_weights_themselves(
    network: str, rank: int | None
) -> None:
    run = translated("a.yaml", JOB % f"network: {network}").run
    assert (run["lora_rank"].value if "lora_rank" in run else None) == rank
    assert ("trainable_models" in run) == (rank is None)


@pytest.mark.parametrize(("ending", "kind"), (("txt", "needless"), ("cap", "missing")))
def test_captions_in_files_that_are_not_found_are_not_carried_over(
    ending: str, kind: str
) -> None:
    job = JOB % f"datasets: [{{folder_path: a, caption_ext: {ending}}}]"
    assert result(translated("a.yaml", job), "caption_ext").kind == kind
    Path("d.toml").write_text(
        f"[[datasets]]\nimage_directory = 'a'\ncaption_extension = '.{ending}'\n"
    )
    found = translated("a.sh", f"{SCRIPT} --dataset_config d.toml")
    assert result(found, "caption_extension").kind == kind
    if kind == "missing":
        assert "rename them to .txt" in result(found, "caption_extension").lost


def test_several_words_are_no_name_of_a_folder() -> None:
    found = translated("a.sh", f"{SCRIPT} --output_dir o --output_name my dogs")
    assert "output_path" not in found.run
    for key in ("output_dir", "output_name"):
        assert "write it in quotes" in result(found, key).lost
    assert "['" not in str(found.run)
