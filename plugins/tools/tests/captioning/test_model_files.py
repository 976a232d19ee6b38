"""A model is found in a folder or on a hub, in the layout of a pipeline or by itself."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dstrain import DstrainError, StateError, UsageError
from dstrain.config.options import Hub
from dstrain_tools.captioning.model_files import find_model

from tests.support import hub_server

Toy = Callable[[str], Path]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """A hub without models, in the place of both."""
    monkeypatch.chdir(tmp_path)
    with hub_server.serving() as running:
        hub_server.use(monkeypatch, running.url, tmp_path)
        yield running


def test_a_pipelines_text_encoder_is_found_in_its_folder(toy: Toy) -> None:
    folder = toy("qwen")
    found = find_model(str(folder), None)
    assert found.is_pipeline
    assert (found.weights, found.tokenizer, found.processor) == (
        folder / "text_encoder",
        folder / "tokenizer",
        None,
    )
    assert found.pipeline_class == "QwenImagePipeline"
    assert [path.name for path in found.weight_files()] == ["model.safetensors"]


def test_a_pipeline_is_downloaded_without_what_generates(
    toy: Toy, server: hub_server.Hub, hub: Hub, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    shutil.copytree(toy("qwen"), published)
    if hub == "huggingface":
        # Some pipelines have one there, from which nothing follows.
        (published / "config.json").write_text("{}")
    server.add("Some/Pipeline", published)
    found = find_model("Some/Pipeline", hub)
    assert found.is_pipeline
    assert found.config()["model_type"] == "qwen2_5_vl"
    fetched = {name.split("/")[0] for name in server.fetched}
    assert fetched - {"config.json"} == {"text_encoder", "tokenizer"}
    server.forget()
    assert find_model("Some/Pipeline", hub) == found
    assert not server.fetched


def test_a_model_is_downloaded_with_its_small_files_and_without_pickles(
    toy: Toy, server: hub_server.Hub, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    shutil.copytree(toy("llava"), published, ignore=lambda *_: {"pipeline"})
    (published / "pytorch_model.bin").write_bytes(b"pickle")
    (published / "modeling.py").write_text("raise SystemExit")
    (published / "notes.md").write_text("words")
    server.add("Some/Model", published)
    found = find_model("Some/Model", "huggingface")
    assert {path.name for path in published.iterdir()} - {
        path.name for path in found.weights.iterdir()
    } == {"pytorch_model.bin", "modeling.py", "notes.md"}


def test_what_is_not_there_and_may_not_be_downloaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path))
    with pytest.raises(StateError, match="DSTRAIN_SKIP_DOWNLOAD") as error:
        find_model("Qwen/Qwen-Image", None)
    assert error.value.where == str(tmp_path / "Qwen/Qwen-Image")


@pytest.mark.parametrize(
    ("name", "kind"),
    (("absent", StateError), ("empty", UsageError), ("file.safetensors", UsageError)),
)
def test_what_is_no_model_is_refused(
    name: str, kind: type[DstrainError], empty: Path
) -> None:
    Path("empty").mkdir()
    Path("file.safetensors").touch()
    with pytest.raises(kind, match=name):
        find_model(name, None)


def write(folder: Path, content: str = '{"model_type": "blip"}') -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content)
    return str(folder)


def test_a_pipeline_has_the_tokenizer_of_its_processor_and_without_any_is_refused(
    tmp_path: Path,
) -> None:
    encoder = tmp_path / "text_encoder"
    write(encoder, '{"model_type": "qwen2_5_vl"}')
    with pytest.raises(StateError, match="tokenizer"):
        find_model(str(tmp_path), None)
    (tmp_path / "processor").mkdir()
    # The same weights in the format of another program.
    for name in ("consolidated", "model-00001-of-00002", "model-00002-of-00002"):
        (encoder / f"{name}.safetensors").touch()
    found = find_model(str(tmp_path), None)
    assert found.tokenizer == found.processor == tmp_path / "processor"
    assert len(found.weight_files()) == 2


@pytest.mark.parametrize(
    ("file", "named"),
    [
        # Weights of other formats are not read.
        ("pytorch_model.bin", r"\.safetensors"),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002"),
    ],
)
def test_absent_weights_are_named(file: str, named: str, tmp_path: Path) -> None:
    found = find_model(write(tmp_path), None)
    (tmp_path / file).write_bytes(b"pickle")
    with pytest.raises(StateError, match=named):
        found.weight_files()
