"""The files that a run needs are found, and no others opened; what is missing is named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import ModelConfig, StateError, run
from dstrain.errors import MissingFiles
from dstrain.models import find
from dstrain.models.hub import model_base
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, IDS, MODEL, weights_of
from tests.support.runs import config, files, same, train

pytestmark = pytest.mark.usefixtures("tiny")
TINY = Path("models/Tiny/Tiny")
ORIGINS = "model_id_with_origin_paths"
DIT = ModelConfig(None, "Tiny/Tiny", "transformer/model*.safetensors")


def test_a_configuration_is_found_where_one_can_be(here: Path) -> None:
    def found(given: ModelConfig) -> Any:
        return find(MODEL, [given], ["dit"]).configs["dit"]

    paths = weights_of(here / "model")["dit"]
    beside = here / "model/transformer/config.json"
    content, published = json.loads(beside.read_text()), {"width": 8, "depth": 2}
    assert content != published
    assert found(ModelConfig(paths)) == content
    beside.unlink()
    assert found(ModelConfig(paths)) == published
    one = {name: value for path in paths for name, value in load_file(path).items()}
    twice = {name: torch.cat([value, value]) for name, value in one.items()}
    save_file(twice, here / "twice.safetensors")
    with pytest.raises(StateError, match=r" dit: (?s:.*): Tiny/Tiny") as caught:
        found(ModelConfig(here / "twice.safetensors"))
    assert caught.value.where == f"{here}/config.json"
    both = [ModelConfig(here / name) for name in ("twice.safetensors", "gone")]
    with pytest.raises(StateError, match=" dit: "):  # what is not here does not tell
        find(MODEL, both, ["dit", "vae"], absent=[])
    assert found(DIT) == content
    (TINY / "transformer/config.json").unlink()
    assert found(DIT) == published
    header = {"config": json.dumps({**published, "dropout": 0.5})}
    save_file(one, here / "alone.safetensors", header)
    assert found(ModelConfig(here / "alone.safetensors"))["dropout"] == 0.5


def test_a_configuration_alone_needs_no_weights(here: Path) -> None:
    shutil.rmtree(TINY / "transformer")
    by_id = [DIT, ModelConfig(None, "Tiny/Tiny", "vae/model*")]
    found = find(MODEL, by_id, ["vae"], config_only=["dit"])
    assert set(found.files) == {"vae"}
    assert found.configs["dit"] == {"width": 8, "depth": 2}
    shutil.copytree(TINY / "vae", "models/Other/One/vae")
    Path("models/Other/One/vae/config.json").write_text('{"branch": 4}')
    vae = ModelConfig(None, "Other/One", "vae/model*")
    assert find(MODEL, [by_id[0], vae], (), ["vae"]).configs["vae"] == {"branch": 4}


OTHER_PLACES = tuple(
    replace(part, other_folders=("some/words",)) if part.is_folder else part
    for part in COMPONENTS
)
ELSEWHERE = replace(MODEL, components=f"{__name__}:OTHER_PLACES")


def test_the_tokenizer_is_found_beside_by_id_or_by_flag(here: Path) -> None:
    default, other = here / TINY / "tokenizer", here / "models/Other/One/tokenizer"
    shutil.copytree("model/text_encoder", "models/Other/One/text_encoder")
    for place in (here / "model/tokenizer", other, here / "anything"):
        shutil.copytree(default, place, dirs_exist_ok=True)

    def tokenizer(
        *given: ModelConfig, family: Any = MODEL, alone: bool = False
    ) -> Path:
        names = ["text_encoder", "tokenizer"][alone:]
        found = find(family, given, names).files["tokenizer"].paths[0]
        return found.resolve()

    by_path = ModelConfig(weights_of(here / "model")["text_encoder"])
    by_id = ModelConfig(None, "Other/One", "text_encoder/model*.safetensors")
    flag = ModelConfig(here / "anything", component="tokenizer")
    assert tokenizer(by_path) == here / "model/tokenizer"
    # Alone, it is found by files that are not read.
    assert tokenizer(by_id) == tokenizer(by_id, alone=True) == other
    # Of several models by id, the first that is named.
    more = ModelConfig(None, "Tiny/Tiny", "vae/model*.safetensors")
    assert tokenizer(by_id, more, alone=True) == other
    assert tokenizer(by_path, flag) == here / "anything"
    shutil.rmtree(here / "model/tokenizer")
    shutil.rmtree(other)
    assert tokenizer(by_path) == tokenizer(by_id) == default
    shutil.rmtree(default)
    words = r"tokenizer: .*model/tokenizer.*Tiny/Tiny/tokenizer(?s:.*)--tokenizer_path"
    with pytest.raises(StateError, match=words):
        tokenizer(by_path)
    missing: list[MissingFiles] = []
    find(MODEL, [by_path], ["tokenizer"], absent=missing)
    assert missing
    # Files that lie in no folder may have it in one beside them.
    shutil.copytree("anything", "flat/some/words")
    for name in ("model-1-of-1.safetensors", "config.json"):
        shutil.copy(f"model/text_encoder/{name}", "flat")
    flat = ModelConfig("flat/model-1-of-1.safetensors")
    assert tokenizer(flat, family=ELSEWHERE) == here / "flat/some/words"


def test_the_tokenizers_flag_reaches_the_run(here: Path) -> None:
    shutil.move("model/tokenizer", "words")
    shutil.rmtree("models")
    with pytest.raises(StateError, match="tokenizer"):
        train(here, max_steps=1)
    # It is a folder, or one of a published model.
    published = Path("models/Other/One/words")
    shutil.copytree("words", published)
    made = []
    for offset, place, flag in (
        (7, Path("words"), "words"),
        (8, Path("words"), "words"),
        (8, published, "Other/One:words/"),
    ):
        text = json.dumps({"offset": offset})
        (place / "vocabulary.json").write_text(text)
        flags: dict[str, Any] = {"family_options": {"tokenizer_path": flag}}
        flags |= {"output_path": here / str(len(made)), "max_steps": 3}
        made.append(files(train(here, **flags)))
    assert not same(*made[:2])
    assert same(*made[1:])


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("trained", ["dit", "text_encoder"])
def test_a_stage_never_opens_the_files_it_does_not_need(
    trained: str, by_id: bool, here: Path
) -> None:
    flags: dict[str, Any] = {
        "feature_cache": here / "cache",
        "trainable_models": trained,
        "max_steps": 2,
        "model_paths": json.dumps(list(weights_of(here / "model").values())),
    }
    if by_id:
        flags |= {"model_paths": None, ORIGINS: IDS}
    whole = files(train(here, output_path=here / "whole", **flags))
    cached, fresh = {"vae"}, {"transformer"}
    (cached if trained == "dit" else fresh).update({"text_encoder", "tokenizer"})
    place = here / (TINY if by_id else "model")
    shutil.move(place, "kept")
    if not by_id:
        shutil.rmtree("models")
    for stage, parts in (("sft:data_process", cached), ("sft:train", fresh)):
        for part in parts:
            shutil.copytree(Path("kept") / part, place / part)
        run(config(here, task=stage, **flags))
        shutil.rmtree(place)
        shutil.rmtree("data", ignore_errors=True)
    assert same(whole, files(here / "out"))


@pytest.mark.parametrize("tool", ["DSTRAIN", "DIFFSYNTH"])
def test_model_ids_lie_where_the_environment_says(
    tool: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_base() == Path("models")
    shutil.move("models", "elsewhere")
    flags = {"model_paths": None, ORIGINS: IDS, "max_steps": 1}
    with pytest.raises(StateError) as caught:
        train(here, **flags)
    assert caught.value.where == "models/Tiny/Tiny/transformer/model*.safetensors"
    monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", "nowhere")
    monkeypatch.setenv(f"{tool}_MODEL_BASE_PATH", str(here / "elsewhere"))
    train(here, **flags)
