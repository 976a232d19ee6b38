"""Published files are fetched where a stage needs them, from either hub, verified,
recorded, and asked for once.
"""

import json
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import ModelConfig, StateError, SystemFault, UsageError
from dstrain.cli.main import main
from dstrain.config.options import Hub
from dstrain.models import assign, find
from dstrain.models.hub import RECORD, ModelSource, chosen_hub, fetch
from dstrain.models.hub.clients import CLIENTS, first_line
from dstrain.plugin import Unit

from tests.support import family
from tests.support.family import write
from tests.support.hub_server import (
    SHARDS,
    TINY,
    Faults,
    Hub as Server,
    commit,
    point_at,
)

pytestmark = pytest.mark.usefixtures("tiny")
IDS = f"{TINY}:transformer/*.safetensors,{TINY}:text_encoder/model*.safetensors,{TINY}:vae/*.safetensors"


def names(folder: Path) -> list[str]:
    """Every file below a folder but what the record and the lock are."""
    files = (
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    )
    return sorted(name for name in files if name not in (RECORD, ".dstrain.lock"))


def dstrain(*words: Any) -> int:
    return main([str(word) for word in words])


def test_each_stage_fetches_what_it_needs_and_nothing_else(
    server: Server,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def knowing(
        input_image: Any, *, vae: Any, dtype: Any, dit_config: Any
    ) -> family.Latents:
        assert dit_config.width == 8
        return family.encode_image(input_image, vae=vae, dtype=dtype)

    # pytest rewrites its assertion, so that no source says what it computes.
    units = (family.encode_prompt, Unit(knowing, version=1))
    specs = {name: replace(one, units=units) for name, one in family.PIPELINES.items()}
    monkeypatch.setattr(family, "PIPELINES", specs)
    flags = (
        "--model",
        "tiny",
        "--model_id_with_origin_paths",
        IDS,
        "--hub",
        hub,
        "--feature_cache",
        "cache",
    )
    assert (
        dstrain(*flags, "--task", "sft:data_process", "--dataset_base_path", "data")
        == 0
    )
    first = {
        "text_encoder/model-1-of-1.safetensors", "text_encoder/config.json", "vae/model-1-of-1.safetensors",
        "vae/config.json", "tokenizer/vocabulary.json", "transformer/config.json",
    }  # fmt: skip
    assert set(server.fetched) == first
    server.forget()
    assert (
        dstrain(
            *flags, "--task", "sft:train", "--output_path", "out", "--max_steps", "1"
        )
        == 0
    )
    assert set(server.fetched) == set(SHARDS)
    assert "dstrain generate --run out" in capsys.readouterr().err
    recorded = json.loads(Path("out/logs/config.json").read_text())
    assert recorded["hub"] == hub  # what that command reads
    server.forget()
    command = (
        "generate",
        *flags[:6],
        "--prompt",
        "dog",
        "--output",
        "dog.png",
        "--num_inference_steps",
        "1",
    )
    assert dstrain(*command) == 0
    assert server.requests == []
    assert names(Path("models") / TINY) == sorted({*first, *SHARDS})


def test_an_unsplit_run_and_inference_fetch_everything(
    server: Server, hub: Hub
) -> None:
    flags = ("--model", "tiny", "--model_id_with_origin_paths", IDS, "--hub", hub)
    command = (
        *flags,
        "--prompt",
        "dog",
        "--output",
        "dog.png",
        "--num_inference_steps",
        "1",
    )
    assert dstrain("generate", *command) == 0
    assert set(SHARDS) < set(server.fetched)
    server.forget()
    assert (
        dstrain(
            *flags,
            "--dataset_base_path",
            "data",
            "--output_path",
            "out",
            "--max_steps",
            "1",
        )
        == 0
    )
    assert server.requests == []


@pytest.mark.parametrize("command", [("--dry_run",), ("graph",)], ids=" ".join)
def test_planning_asks_no_hub(
    server: Server, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--model",
        "tiny",
        "--model_id_with_origin_paths",
        IDS,
        "--dataset_base_path",
        "data",
    )
    first = (command[0], *flags) if command == ("graph",) else (*flags, *command)
    assert dstrain(*first) == 0
    assert "loads text_encoder, vae, tokenizer" in capsys.readouterr().out.replace(
        "tokenizer, vae", "vae, tokenizer"
    )
    assert server.requests == []


def test_files_of_unknown_names_are_fetched_only_until_the_wanted_components_are_found(
    server: Server,
) -> None:
    for name, place in family.FOLDERS.items():
        shutil.copy(
            f"published/{place}/model-1-of-{2 if name == 'dit' else 1}.safetensors",
            f"published/{name}.safetensors",
        )
    server.add(TINY, Path("published"))
    ids = [
        ModelConfig(None, TINY, f"{name}.safetensors")
        for name in ("vae", "text_encoder", "dit")
    ]

    assert set(assign(ids, family.COMPONENTS, ["text_encoder"])) == {
        "vae",
        "text_encoder",
    }
    assert "dit.safetensors" not in server.fetched
    known = tuple(
        replace(part, original_filenames=(f"{part.name}.*",))
        for part in family.COMPONENTS
    )
    server.forget()
    shutil.rmtree("models")
    assert set(assign(ids, known, ["text_encoder"])) == {"text_encoder"}
    assert "vae.safetensors" not in server.fetched


def test_what_is_here_is_used_without_asking_and_what_is_gone_is_fetched_again(
    server: Server, hub: Hub
) -> None:
    source, folder = ModelSource(TINY, hub=hub), Path("models") / TINY
    assert fetch(source, "transformer/*.safetensors") == SHARDS
    server.forget()
    assert fetch(source, "transformer/*.safetensors") == SHARDS
    assert fetch(source, SHARDS[1]) == SHARDS[1:]
    assert server.requests == []
    for gone in SHARDS:
        (folder / gone).unlink()
        assert fetch(source, "transformer/*.safetensors") == SHARDS
        assert server.fetched == [gone]
        server.forget()


def test_a_pinned_revision_is_fetched_and_another_one_replaces_only_what_differs(
    server: Server, hub: Hub
) -> None:
    write(Path("second"), seed=1)
    shutil.copy(
        "published/transformer/model-1-of-2.safetensors",
        "second/transformer/model-1-of-2.safetensors",
    )
    server.add(TINY, Path("second"), "v2")
    source, folder, pattern = (
        ModelSource(TINY, hub=hub),
        Path("models") / TINY,
        "transformer/*.safetensors",
    )
    fetch(source, pattern)
    server.forget()
    pinned = replace(source, revision="v2")
    assert fetch(pinned, pattern) == SHARDS
    assert server.fetched == [SHARDS[1]]
    assert (folder / SHARDS[1]).read_bytes() == Path("second", SHARDS[1]).read_bytes()
    server.forget()
    assert (
        fetch(pinned, pattern) == fetch(source, pattern) == SHARDS
    )  # without a revision: what is here
    if hub == "huggingface":
        sha = commit(server.models[TINY]["v2"])
        assert fetch(replace(source, revision=sha), pattern) == SHARDS
    assert server.requests == []
    assert (
        fetch(
            replace(source, revision="main" if hub == "huggingface" else "master"),
            pattern,
        )
        == SHARDS
    )
    assert server.fetched == [SHARDS[1]]
    with pytest.raises(
        StateError,
        match=r"Tiny/Tiny@v3: no such model or revision on \w+ \(.*\)\n",
    ):
        fetch(replace(source, revision="v3"), pattern)


def test_what_is_fetched_later_is_of_the_revision_that_is_here(server: Server) -> None:
    first: dict[Hub, str] = {"modelscope": "v1", "huggingface": "main"}
    server.add(TINY, Path("published"), "v1")
    write(Path("second"), seed=1)
    for hub, revision in first.items():
        source = ModelSource(TINY, hub=hub)
        fetch(replace(source, revision=revision), "vae/*.safetensors")
        server.add(
            TINY, Path("second")
        )  # the branch moves on; on Hugging Face its commit is known
        assert fetch(source, "transformer/*.safetensors") == SHARDS
        for name in (*SHARDS, "vae/model-1-of-1.safetensors"):
            assert (
                Path("models", TINY, name).read_bytes()
                == Path("published", name).read_bytes()
            )
        shutil.rmtree("models")
        server.add(TINY, Path("published"))


def test_a_revision_is_given_with_the_id(server: Server, hub: Hub) -> None:
    write(Path("second"), seed=1)
    server.add(TINY, Path("second"), "v2")
    ids = IDS.replace(f"{TINY}:transformer", f"{TINY}@v2:transformer")
    flags = (
        "--model",
        "tiny",
        "--model_id_with_origin_paths",
        ids,
        "--hub",
        hub,
        "--prompt",
        "a",
    )
    assert (
        dstrain("generate", *flags, "--output", "dog.png", "--num_inference_steps", "1")
        == 0
    )
    for name in (*SHARDS, "vae/model-1-of-1.safetensors"):
        assert (
            Path("models", TINY, name).read_bytes() == Path("second", name).read_bytes()
        )


@pytest.mark.parametrize(
    "variable", ["DSTRAIN_SKIP_DOWNLOAD", "DIFFSYNTH_SKIP_DOWNLOAD"]
)
def test_offline_nothing_is_asked_and_what_is_missing_is_named(
    variable: str, server: Server, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource(TINY, hub=hub)
    fetch(source, "vae/*.safetensors")
    server.forget()
    monkeypatch.setenv(variable, "True")
    assert fetch(source, "vae/*.safetensors") == ["vae/model-1-of-1.safetensors"]
    for asked in (
        replace(source, revision="v2"),
        replace(source, model_id="Tiny/Other"),
    ):
        with pytest.raises(
            StateError,
            match=rf"(?s)vae/\*\.safetensors: .*nothing is downloaded because {variable} is set",
        ):
            fetch(asked, "vae/*.safetensors")
    flags = ("--model", "tiny", "--model_id_with_origin_paths", IDS, "--hub", hub)
    assert dstrain("generate", *flags, "--prompt", "a", "--output", "a.png") == 3
    assert server.requests == []


def test_progress_bars_are_for_a_terminal(
    server: Server, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(ModelSource(TINY, hub=hub), "transformer/*.safetensors")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("downloading 3 files, ")


def test_a_url_in_what_a_client_says_is_shown_without_what_may_be_secret() -> None:
    said = "GET 'https://u:p@h.example/x?signed=y' failed\nmore"
    assert first_line(said) == "GET 'https://***@h.example/x?***' failed"


def test_a_hub_that_fails_is_no_error_for_files_that_are_here(
    server: Server, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = ModelSource(TINY, hub=hub), Path("models") / TINY
    fetch(source, "transformer/*.safetensors")
    # It belongs to the files, which can be used without it.
    (folder / "transformer/config.json").unlink()
    server.faults = Faults(listing=True, status=500)
    server.forget()
    capsys.readouterr()
    assert fetch(source, "transformer/*.safetensors") == SHARDS
    assert capsys.readouterr().err == ""
    assert server.requests == []
    server.faults = Faults(status=500)
    with pytest.raises(
        SystemFault, match=rf"vae/config\.json cannot be downloaded from {hub}"
    ):
        fetch(source, "vae/*.safetensors")


def test_a_configuration_alone_that_cannot_be_fetched_is_done_without(
    server: Server, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:

    server.faults = Faults(listing=True, status=500)
    configs = [ModelConfig(None, TINY, "transformer/*.safetensors", hub=hub)]
    assert find(family.MODEL, configs, (), ("dit",)).configs["dit"] == {
        "width": 8,
        "depth": 2,
    }  # published
    assert capsys.readouterr().err.startswith(
        f"dstrain: warning: Tiny/Tiny: cannot be downloaded from {hub}"
    )


def test_no_hub_is_asked_for_the_configuration_of_files_that_were_put_here(
    server: Server, hub: Hub
) -> None:
    vae = Path("models") / TINY / "vae"
    shutil.copytree("published/vae", vae)
    configs = [ModelConfig(None, TINY, "transformer/*.safetensors", hub=hub)]
    found = find(family.MODEL, configs, (), ("dit",)).configs["dit"]
    assert found == {"width": 8, "depth": 2}  # published
    assert server.requests == []


def test_the_nearest_name_is_suggested_when_none_fits(server: Server, hub: Hub) -> None:
    with pytest.raises(StateError) as caught:
        fetch(ModelSource(TINY, hub=hub), "transformer/modell-*.safetensors")
    assert f"files on {hub} at revision" in caught.value.what
    assert "did you mean 'transformer/model-2-of-2.safetensors'?" in caught.value.what
    assert not Path("models/Tiny").exists()


def fetch_in_a_process(place: Path, hub: Hub) -> None:
    os.environ["DSTRAIN_MODEL_BASE_PATH"] = str(place)
    fetch(ModelSource(TINY, hub=hub), "transformer/*.safetensors")


def test_of_several_processes_one_fetches(
    server: Server, hub: Hub, tmp_path: Path
) -> None:
    server.faults = Faults(delay=0.2)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=fetch_in_a_process, args=(tmp_path / "models", hub))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(server.fetched) == sorted([*SHARDS, "transformer/config.json"])


def test_no_access_token_is_logged_or_written(
    server: Server,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret, user = "hf_planted0123", "planted:word"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", secret)
    point_at(monkeypatch, server.url.replace("//", f"//{user}@"))
    printed = ""
    for faults in (
        Faults(listing=True, status=403),
        Faults(status=500),
        Faults(listing=True, status=500),
        Faults(),
    ):
        server.faults = faults
        try:
            fetch(ModelSource(TINY, hub=hub), "transformer/*.safetensors")
        except SystemFault as fault:
            printed += str(fault)
    printed += "".join(capsys.readouterr())
    written = b"".join(
        path.read_bytes() for path in Path("models").rglob("*") if path.is_file()
    )
    assert f"{hub} (http://***@127.0.0.1:" in printed
    assert secret not in printed and "planted" not in printed
    assert b"planted" not in written
    shutil.rmtree("models")
    point_at(monkeypatch, server.url)
    fetch(ModelSource(TINY, hub=hub), "transformer/*.safetensors")
    assert any(
        secret in sent for sent in server.tokens
    )  # and yet it is sent to the hub


def test_an_id_must_be_one_and_a_list_may_not_lead_elsewhere(
    server: Server, hub: Hub
) -> None:
    for model_id in ("Tiny", "../Tiny", "Tiny/..", "a/b/c", "/etc/x"):
        with pytest.raises(UsageError, match="is not a model id; expected OWNER/NAME"):
            fetch(ModelSource(model_id, hub=hub), "x.safetensors")
    for name in (
        "../../evil.safetensors",
        "/evil.safetensors",
        "a\\..\\evil.safetensors",
    ):
        server.faults = Faults(lists={name: b"evil"})
        with pytest.raises(SystemFault, match="outside the model's folder"):
            fetch(ModelSource(TINY, hub=hub), "*.safetensors")
    assert not list(Path().rglob("evil*"))


def test_a_digest_that_leads_elsewhere_writes_nothing_over(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = CLIENTS["huggingface"].list_files

    def lying(*arguments: Any) -> Any:
        at, files = listed(*arguments)
        other = {
            name: replace(file, digest="sha256:..") for name, file in files.items()
        }
        return at, other

    monkeypatch.setattr(CLIENTS["huggingface"], "list_files", lying)
    with pytest.raises(SystemFault, match="sent something other than what it lists"):
        fetch(ModelSource(TINY, hub="huggingface"), "vae/*.safetensors")
    assert not list((Path("models") / TINY).glob("[!.]*"))


def test_the_hub_is_that_of_the_flag_else_of_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen_hub(None) == "modelscope"
    monkeypatch.setenv("DIFFSYNTH_DOWNLOAD_SOURCE", "HuggingFace")
    assert chosen_hub(None) == "huggingface"
    assert chosen_hub("modelscope") == "modelscope"
    monkeypatch.setenv("DSTRAIN_DOWNLOAD_SOURCE", "modelscope")
    assert chosen_hub(None) == "modelscope"
    monkeypatch.setenv("DSTRAIN_DOWNLOAD_SOURCE", "hugginface")
    with pytest.raises(UsageError, match="did you mean 'huggingface'") as error:
        chosen_hub(None)
    assert error.value.where == "variable DSTRAIN_DOWNLOAD_SOURCE"
