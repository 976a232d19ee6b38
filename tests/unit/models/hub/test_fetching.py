"""Published files are fetched where a stage needs them, verified, and asked for once."""

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import (
    GenerateConfig,
    ModelConfig,
    StateError,
    SystemFault,
    UsageError,
    generate,
    run,
)
from dstrain.cli.main import main
from dstrain.models import assign, find
from dstrain.models.hub import RECORD, ModelSource, chosen_hub, fetch, find_paths
from dstrain.plugin import versioned
from dstrain.registry import load_family

from tests.support import family
from tests.support.family import IDS, write
from tests.support.hub_server import SHARDS, TINY, Faults, Hub, commit, point_at
from tests.support.runs import config, train
from tests.support.toys import dataset, toy

pytestmark = pytest.mark.usefixtures("tiny")
ORIGINS = "model_id_with_origin_paths"
DIT, VAE = "transformer/*.safetensors", "vae/*.safetensors"
FOLDER = Path("models") / TINY
VAE_FILE = "vae/model-1-of-1.safetensors"


@pytest.fixture
def source(hub: Any) -> ModelSource:
    return ModelSource(TINY, hub=hub)


def content(name: str, folder: Path | str = FOLDER) -> bytes:
    return Path(folder, name).read_bytes()


def image(hub: Any, **flags: Any) -> GenerateConfig:
    small: dict[str, Any] = {"prompt": "dog", "num_inference_steps": 1}
    return GenerateConfig(
        model="tiny", hub=hub, output=Path("dog.png"), **small, **flags
    )


def knowing(
    input_image: Any, *, vae: Any, vae_config: Any, dtype: Any, dit_config: Any
) -> family.Latents:
    """An image's latents, which depend on the denoiser's configuration."""
    assert (dit_config.width, vae_config.branch) == (8, 8)
    return family.encode_image(input_image, vae=vae, dtype=dtype)


# pytest rewrites its assertion, so that no source says what it computes.
UNITS = (family.encode_prompt, versioned(1)(knowing))
PIPELINES = {name: replace(one, units=UNITS) for name, one in family.PIPELINES.items()}
FAMILY = replace(family.MODEL, name="knowing", pipelines=f"{__name__}:PIPELINES")


@pytest.mark.parametrize("way", [{"model_id": TINY}, {ORIGINS: IDS}])
def test_each_stage_fetches_what_it_needs_and_nothing_else(
    way: dict[str, str],
    server: Hub,
    hub: Any,
    tmp_path: Path,
    fake_plugin: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_plugin("plugin-knowing", {"knowing": f"{__name__}:FAMILY"}, {})
    flags = {"model": "knowing", "hub": hub, "model_paths": None, **way}
    run(config(tmp_path, **flags, dry_run=True))
    assert server.requests == []
    cached = {**flags, "feature_cache": tmp_path / "cache"}
    run(config(tmp_path, **cached, task="sft:data_process"))
    encoder = "text_encoder/model-1-of-1.safetensors"
    configurations = {f"{place}/config.json" for place in family.FOLDERS.values()}
    first = {encoder, VAE_FILE, "tokenizer/vocabulary.json", *configurations}
    assert set(server.fetched) == first
    server.forget()
    out = train(tmp_path, **cached, task="sft:train", max_steps=1)
    assert set(server.fetched) == set(SHARDS)
    assert f"dstrain generate --run {out}" in capsys.readouterr().err
    # What that command reads.
    assert json.loads((out / "logs/config.json").read_text())["hub"] == hub
    server.forget()
    generate(image(hub, **way))
    assert server.requests == []
    here = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*[!k]")}
    assert here == {*first, *SHARDS, RECORD}


def put_into_cache(cache: Path, model_id: str, model: Path) -> Path:
    """Put a model into a Hugging Face cache; return its folder there, where links lead to
    files without an ending.
    """
    cached = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = cached / "snapshots" / ("a" * 40)
    for number, path in enumerate(sorted(model.rglob("*.*"))):
        place = snapshot / path.relative_to(model)
        place.parent.mkdir(parents=True, exist_ok=True)
        blob = cached / "blobs" / str(number)
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(path, blob)
        place.symlink_to(blob)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("a" * 40)
    return snapshot


CACHED = (
    ("flux2", "dev", "black-forest-labs/FLUX.2-dev"),
    ("flux2", "klein-base", "black-forest-labs/FLUX.2-klein-base-9B"),
    ("sdxl", "base", "stabilityai/stable-diffusion-xl-base-1.0"),
    ("sdxl", "inpaint", "diffusers/stable-diffusion-xl-1.0-inpainting-0.1"),
    ("z_image", "base", "Tongyi-MAI/Z-Image"),
    ("z_image", "omni", "Tongyi-MAI/Z-Image-Omni-Base"),
)


@pytest.mark.drawn  # it trains a toy
@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("name", "variant", "model_id"), CACHED)
def test_a_published_model_is_trained_from_the_hugging_face_cache(
    name: str,
    variant: str,
    model_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With other files of its folders, which are not for it."""
    cache = tmp_path / "hf"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    known = load_family(name)
    places = [*known.model_files[model_id].values(), *known.default_ids.values()]
    others = {one.partition(":")[0] for one in places if ":" in one}
    for one in {model_id, *others}:
        snapshot = put_into_cache(cache, one, toy(name, variant))
        for path in [*snapshot.glob("unet/*.safetensors")]:
            path.with_suffix(".fp16.safetensors").symlink_to(path.readlink())
            (snapshot / f"{variant}.safetensors").symlink_to(path.readlink())
    words = ["--model_id", model_id, "--dataset_base_path", str(dataset(name, variant))]
    words += ["--lora_rank", "2", "--max_steps", "1", "--output_path", "out"]
    assert main(words) == 0
    assert not Path("models").exists()


@pytest.mark.parametrize("way", [{"model_id": TINY}, {ORIGINS: IDS}])
def test_a_model_in_the_hugging_face_cache_is_used_there_and_what_it_lacks_is_fetched(
    way: dict[str, str],
    server: Hub,
    hub: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    snapshot = put_into_cache(tmp_path / "hf", TINY, Path("published"))
    flags = {"hub": hub, "model_paths": None, **way}
    train(tmp_path, **flags, max_steps=1)
    assert server.requests == []
    assert not Path("models").exists()
    (snapshot / VAE_FILE).unlink()
    train(tmp_path, **flags, max_steps=1, overwrite=True)
    assert set(server.fetched) == {VAE_FILE, "vae/config.json"}
    server.fetched.clear()
    source = ModelSource(TINY, hub=hub)
    assert find_paths(source, "tokenizer/") == [snapshot / "tokenizer"]
    (vocabulary,) = (snapshot / "tokenizer").iterdir()
    vocabulary.rename(vocabulary.with_name("tokenizer_config.json"))
    assert find_paths(source, "tokenizer/") == [source.folder / "tokenizer"]


def test_files_of_unknown_names_are_fetched_only_until_the_wanted_components_are_found(
    server: Hub,
) -> None:
    for name, place in family.FOLDERS.items():
        first = min(Path("published", place).glob("model-1-*.safetensors"))
        shutil.copy(first, f"published/{name}.safetensors")
    server.add(TINY, Path("published"))
    names = ("vae", "text_encoder", "dit")
    ids = [ModelConfig(None, TINY, f"{name}.safetensors") for name in names]
    found = assign(ids, family.COMPONENTS, ["text_encoder"])
    assert set(found) == {"vae", "text_encoder"}
    assert "dit.safetensors" not in server.fetched
    known = [
        replace(part, original_filenames=(f"{part.name}.*",))
        for part in family.COMPONENTS
    ]
    server.forget()
    shutil.rmtree("models")
    assert set(assign(ids, known, ["text_encoder"])) == {"text_encoder"}
    assert "vae.safetensors" not in server.fetched


def test_a_pinned_revision_is_fetched_and_another_one_replaces_only_what_differs(
    server: Hub, source: ModelSource
) -> None:
    write(Path("second"), seed=1)
    shutil.copy(Path("published", SHARDS[0]), Path("second", SHARDS[0]))
    server.add(TINY, Path("second"), "v2")
    fetch(source, DIT)
    server.forget()
    pinned = replace(source, revision="v2")
    assert fetch(pinned, DIT) == SHARDS
    assert server.fetched == [SHARDS[1]]
    assert content(SHARDS[1]) == content(SHARDS[1], "second")
    server.forget()
    # Without a revision: what is here.
    assert fetch(pinned, DIT) == fetch(source, DIT) == SHARDS
    usual = "master"
    if source.hub == "huggingface":
        usual = "main"
        sha = commit(server.models[TINY]["v2"])
        assert fetch(replace(source, revision=sha), DIT) == SHARDS
    assert server.requests == []
    assert fetch(replace(source, revision=usual), DIT) == SHARDS
    assert server.fetched == [SHARDS[1]]
    with pytest.raises(StateError) as caught:
        fetch(replace(source, revision="v3"), DIT)
    assert caught.value.where == "Tiny/Tiny@v3"


@pytest.mark.parametrize(
    ("hub", "revision"), [("modelscope", "v1"), ("huggingface", "main")]
)
def test_what_is_fetched_later_is_of_the_revision_that_is_here(
    hub: Any, revision: str, source: ModelSource, server: Hub
) -> None:
    """A branch may move on; on Hugging Face its commit is known."""
    server.add(TINY, Path("published"), "v1")
    write(Path("second"), seed=1)
    fetch(replace(source, revision=revision), VAE)
    server.add(TINY, Path("second"))
    assert fetch(source, DIT) == SHARDS
    for name in (*SHARDS, VAE_FILE):
        assert content(name) == content(name, "published")


@pytest.mark.parametrize(
    "way",
    [
        {"model_id": f"{TINY}@v2"},
        {ORIGINS: IDS.replace(f"{TINY}:", f"{TINY}@v2:")},
        {ORIGINS: IDS.replace(f"{TINY}:", f"{TINY}@v2:", 1)},
    ],
)
def test_an_id_has_a_revision(way: dict[str, str], server: Hub, hub: Any) -> None:
    write(Path("second"), seed=1)
    server.add(TINY, Path("second"), "v2")
    generate(image(hub, **way))
    for name in (*SHARDS, VAE_FILE):
        assert content(name) == content(name, "second")


@pytest.mark.parametrize(
    "given", ["DSTRAIN_SKIP_DOWNLOAD=on", "DIFFSYNTH_SKIP_DOWNLOAD=Yes"]
)
def test_offline_nothing_is_asked_and_what_is_missing_is_named(
    given: str, server: Hub, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, value = given.split("=")
    monkeypatch.setenv(variable, "0")
    fetch(source, VAE)
    server.forget()
    monkeypatch.setenv(variable, value)
    assert fetch(source, VAE) == [VAE_FILE]
    for asked in (
        replace(source, revision="v2"),
        replace(source, model_id="Tiny/Other"),
    ):
        with pytest.raises(StateError, match=variable) as caught:
            fetch(asked, VAE)
        assert Path(caught.value.where) == asked.folder / VAE
    assert server.requests == []


UNLISTED = tuple(replace(one, default_configs={}) for one in family.COMPONENTS)


@pytest.mark.parametrize("needed", [VAE, DIT])
def test_a_configuration_that_is_not_here_is_fetched_alone(
    needed: str, server: Hub, source: ModelSource
) -> None:
    fetch(source, needed)
    (FOLDER / "transformer/config.json").unlink(missing_ok=True)
    server.forget()
    unlisted = replace(family.MODEL, components=f"{__name__}:UNLISTED")
    model, files = (unlisted, ["dit"]) if needed == DIT else (family.MODEL, [])
    configs = [ModelConfig(None, TINY, DIT, hub=source.hub)]
    found = find(model, configs, files, ["dit"])
    assert server.fetched == ["transformer/config.json"]
    assert found.configs["dit"] == json.loads(content("transformer/config.json"))


def fetch_in_a_process(place: Path, hub: Any) -> None:
    os.environ["DSTRAIN_MODEL_BASE_PATH"] = str(place)
    fetch(ModelSource(TINY, hub=hub), DIT)


def test_of_several_processes_one_fetches(
    server: Hub, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait as long as it takes, and say so after a while."""
    monkeypatch.setattr("dstrain.models.hub.download.QUIET_WAIT", 0.0)
    server.faults = Faults(delay=0.2)
    fork = multiprocessing.get_context("fork")
    arguments = (tmp_path / "models", hub)
    processes = [fork.Process(target=fetch_in_a_process, args=arguments) for _ in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(server.fetched) == sorted([*SHARDS, "transformer/config.json"])


def test_no_access_token_and_no_query_is_logged_or_written(
    server: Hub,
    source: ModelSource,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And yet the token is sent to the hub."""
    secret = "hf_planted0123"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", secret)
    point_at(monkeypatch, server.url.replace("//", "//planted:word@"))
    printed = ""
    for faults in (
        Faults(listing=True, status=403),
        Faults(status=500),
        Faults(listing=True, status=500),
        Faults(),
    ):
        server.faults = faults
        try:
            fetch(source, DIT)
        except SystemFault as fault:
            printed += str(fault)
    printed += "".join(capsys.readouterr())
    paths = [path for path in Path("models").rglob("*") if path.is_file()]
    assert f"{source.hub} (http://***@127.0.0.1:" in printed
    assert secret not in printed and "planted" not in printed
    assert "FilePath=" not in printed
    assert not any(b"planted" in path.read_bytes() for path in paths)
    shutil.rmtree("models")
    point_at(monkeypatch, server.url)
    fetch(source, DIT)
    assert any(secret in sent for sent in server.tokens)


def test_ids_and_lists_lead_nowhere_else(server: Hub, source: ModelSource) -> None:
    for model_id in ("Tiny", "../Tiny", "Tiny/..", "a/b/c", "/etc/x"):
        with pytest.raises(UsageError, match=f"--{ORIGINS}: "):
            fetch(replace(source, model_id=model_id), "x.safetensors")
    for name in ("../../evil.st", "/evil.st", "a\\..\\evil.st"):
        server.faults = Faults(lists={name: b"evil"})
        with pytest.raises(SystemFault) as caught:
            fetch(source, "*.st")
        assert caught.value.what.endswith(repr(name))
    server.faults = Faults(digest="..")
    with pytest.raises(SystemFault, match=r"vae/\S+"):
        fetch(replace(source, hub="huggingface"), VAE)
    assert not list(Path().rglob("evil*"))
    assert not (FOLDER / VAE_FILE).exists()


def test_the_flag_or_a_variable_names_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_hub(None) == "modelscope"
    monkeypatch.setenv("DIFFSYNTH_DOWNLOAD_SOURCE", "HuggingFace")
    assert chosen_hub(None) == "huggingface"
    assert chosen_hub("modelscope") == "modelscope"
    monkeypatch.setenv("DSTRAIN_DOWNLOAD_SOURCE", "modelscope")
    assert chosen_hub(None) == "modelscope"
    monkeypatch.setenv("DSTRAIN_DOWNLOAD_SOURCE", "hugginface")
    with pytest.raises(UsageError, match="'huggingface'") as error:
        chosen_hub(None)
    assert error.value.where == "variable DSTRAIN_DOWNLOAD_SOURCE"
