"""Each seam, used as a third party would use it, by `dstrain.plugin` alone."""

import ast
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

import pytest
import torch
from dstrain import StateError, UsageError
from dstrain.cli.main import main
from dstrain.plugin import Identity
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.command_lines import BASE
from tests.support.runs import files, flags_of, log, plan_digests, project, train

pytestmark = pytest.mark.usefixtures("tiny")
PROOFS = sorted(Path(__file__).with_name("proofs").glob("*.py"))
LINES = 60
Install = Callable[..., None]
STAGE_1 = "sft:data_process"


@pytest.mark.parametrize("path", PROOFS, ids=lambda path: path.stem)
def test_a_proof_is_short_and_imports_the_interface_alone(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= LINES
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            used.add(str(node.module))
        elif isinstance(node, ast.Import):
            used |= {one.name for one in node.names}
    of_core = {name for name in used if name.partition(".")[0] == "dstrain"}
    parts = ("dstrain.plugin.functional", "dstrain.plugin.lora")
    assert of_core <= {"dstrain.plugin", *parts}


@pytest.fixture
def install(fake_plugin: Callable[..., Path]) -> Iterator[Install]:
    """Install proofs, by the names of their modules, in a group of entry points."""
    used = []

    def add(name: str, group: str = "dstrain", attribute: str = "") -> None:
        sys.modules.pop(name, None)
        used.append(name)
        (path,) = [one for one in PROOFS if one.stem == name]
        place = f"{name}:{attribute}" if attribute else name
        fake_plugin(f"third-{name}", {name: place}, {name: path.read_text()}, group)

    yield add
    for name in used:
        sys.modules.pop(name, None)


def serve(server: socket.socket, answers: dict[int, str], heard: list[str]) -> None:
    """Hear one observer to its end, and answer each of its steps."""
    connection, _ = server.accept()
    with connection, connection.makefile("r") as lines:
        for line in lines:
            heard.append(line)
            told = json.loads(line)
            if "step" in told:
                connection.sendall(answers.get(told["step"], "").encode() + b"\n")


def test_an_observer_sends_steps_to_a_socket_and_saves_and_stops_from_there(
    install: Install, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("remote_observer")
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("REMOTE", f"127.0.0.1:{server.getsockname()[1]}")
        answers = {2: "save", 4: "stop"}
        thread = Thread(target=serve, args=(server, answers, heard), daemon=True)
        thread.start()
        train(here, output_path=tmp_path, max_steps=9)
        thread.join(60)
    *steps, end = map(json.loads, heard)
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    losses = [one["loss"] for one in log(tmp_path)]
    assert [one["loss"] for one in steps] == pytest.approx(losses, rel=1e-4)
    assert end == {"end": "stopped"}
    assert list(files(tmp_path)) == ["step-2.safetensors", "step-4.safetensors"]


def test_an_updater_moves_weights_by_the_signs_of_gradients(
    install: Install, here: Path, tmp_path: Path
) -> None:
    install("sign_updater")
    install("own_optimizer", group="nothing")
    given = {"optimizer": "own_optimizer.Plain", "learning_rate": 0.5}
    train(here, output_path=tmp_path, max_steps=1, **given)
    ((_, weights),) = files(tmp_path).items()
    moved = torch.cat(
        [one.flatten() for key, one in weights.items() if "lora_B" in key]
    )
    assert moved.any()
    assert torch.isin(moved, torch.tensor([0.0, 0.5, -0.5])).all()
    given |= {"resume": "auto", "disabled_plugins": ("sign_updater",)}
    with pytest.raises(StateError, match="sign_updater"):
        train(here, output_path=tmp_path, max_steps=2, **given)


def test_an_optimizer_is_named_by_its_path(
    install: Install, here: Path, tmp_path: Path
) -> None:
    install("own_optimizer", group="nothing")
    given = {"optimizer": "own_optimizer.Plain", "optimizer_args": ("gain=0.5",)}
    train(here, output_path=tmp_path / "whole", max_steps=2, **given)
    train(here, output_path=tmp_path / "parts", max_steps=1, **given)
    train(here, output_path=tmp_path / "parts", max_steps=2, resume="auto", **given)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert {one["step"] for one in log(tmp_path / "whole")} == {1, 2}


def test_a_path_names_a_schedule(install: Install, here: Path, tmp_path: Path) -> None:
    install("wave_schedule", group="nothing")
    given = {"lr_scheduler": "wave_schedule.wave", "learning_rate": 0.1}
    train(here, output_path=tmp_path / "out", max_steps=6, lr_warmup_steps=2, **given)
    rates = [one["learning_rate"] for one in log(tmp_path / "out")]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.05, 0.0, 0.05], abs=1e-6)
    for path, what in (("wave_schedule.surf", "surf"), ("no_such.wave", "no_such")):
        with pytest.raises(UsageError, match=what) as caught:
            train(here, max_steps=1, lr_scheduler=path)
        assert caught.value.where == "--lr_scheduler"


def test_a_loss_reads_a_column_of_its_own(install: Install, tmp_path: Path) -> None:
    install("half_loss")
    here = project(tmp_path)
    with pytest.raises(UsageError, match="importance"):
        train(here, task="weighted", max_steps=1)
    table = here / "data/metadata.json"
    rows = json.loads(table.read_text())
    for importance in (1, 0.5):
        table.write_text(
            json.dumps([{**row, "importance": importance} for row in rows])
        )
        out = tmp_path / f"out {importance}"
        train(here, task="weighted", output_path=out, max_steps=1)
    whole, half = (log(tmp_path / f"out {one}")[0]["loss"] for one in (1, 0.5))
    assert half == pytest.approx(whole / 2, rel=1e-3)
    table.write_text(json.dumps([{**row, "importance": 2} for row in rows]))
    with pytest.raises(UsageError, match="importance"):
        train(here, task="weighted", output_path=tmp_path / "bad", max_steps=1)


def test_a_section_stands_in_the_dry_run(
    install: Install, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("price_section")
    flags = flags_of(here, output_path=here / "never", max_steps=8)
    words = [f"--{name}={value}" for name, value in flags.items()]
    assert main([*words, "--dry_run"]) == 0
    page = capsys.readouterr().out
    assert "Price\n4 cents" in "\n".join(line.strip() for line in page.splitlines())


def test_a_form_reads_a_zip_as_a_folder_of_the_same_pictures_is_read(
    install: Install, here: Path, tmp_path: Path
) -> None:
    install("zip_form")
    rows = json.loads((here / "data/metadata.json").read_text())
    with ZipFile(tmp_path / "photos.zip", "w") as archive:
        for row in rows:
            archive.write(here / "data" / row["image"], row["image"])
            archive.writestr(f"{Path(row['image']).stem}.txt", row["prompt"])
    train(
        here,
        output_path=tmp_path / "zip",
        dataset_base_path=tmp_path / "photos.zip",
        max_steps=3,
    )
    train(here, output_path=tmp_path / "folder", max_steps=3)
    assert log(tmp_path / "zip") == log(tmp_path / "folder")


def test_a_newer_form_reads_again_what_an_older_one_read(
    install: Install,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # As if all had been written long ago.
    monkeypatch.setattr("dstrain.storage.file_memory.SETTLED", -(10**18))
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "user"))
    photos = tmp_path / "photos.zip"
    pictures = sorted((here / "data").glob("*.png"))
    with ZipFile(photos, "w") as archive:
        archive.write(pictures[0], "a.png")
        archive.write(pictures[1], "b.png")
        for name in ("a.txt", "b.txt"):
            archive.writestr(name, "a cat")
    install("zip_form")
    module = tmp_path / "site/zip_form.py"
    newer = module.read_text()
    older = newer.replace("pieces, archive, name", "pieces, archive, 'a.png'")
    for source, missing in ((older, ""), (older, 0), (newer, 1), (newer, 0)):
        module.write_text(source)
        sys.modules.pop("zip_form", None)
        capsys.readouterr()
        given = {"feature_cache": tmp_path / "cache", "dataset_base_path": photos}
        train(here, task=STAGE_1, **given)
        if missing != "":
            assert f"precomputing {missing} of 2" in capsys.readouterr().err


def test_an_option_of_a_plugin_is_part_of_keys_where_it_is_given(
    install: Install, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(here, task=STAGE_1, feature_cache=tmp_path / "before")
    install("flavour_option", "dstrain.options", "FlavourOptions")
    train(here, task=STAGE_1, feature_cache=tmp_path / "plain")
    assert plan_digests(tmp_path / "plain") == plan_digests(tmp_path / "before")
    train(here, task=STAGE_1, feature_cache=tmp_path / "mint", flavour="mint")
    assert (
        plan_digests(tmp_path / "mint").keys()
        != plan_digests(tmp_path / "plain").keys()
    )
    stage_2 = {"task": "sft:train", "feature_cache": tmp_path / "mint", "max_steps": 1}
    with pytest.raises(StateError, match="flavour"):
        train(here, output_path=tmp_path / "a", **stage_2)
    train(here, output_path=tmp_path / "b", flavour="mint", **stage_2)
    with pytest.raises(UsageError, match="one sample at a time"):
        train(here, output_path=tmp_path / "c", flavour="lemon", batch_size=2)
    assert main(["train", "--help"]) == 0
    assert "--flavour" in capsys.readouterr().out


def test_commands_and_hints_join_those_of_dstrain(
    install: Install,
    runs: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("greeting_command")
    assert main(["greet", "you"]) == main(["cache", "greet", "cache"]) == 0
    assert capsys.readouterr().out.split() == ["hello", "you", "hello", "cache"]
    for words, said in (
        ([*BASE, "--lerning_speed", "1"], "use --learning_rate"),
        (["--model", "tinny"], "spelled tiny"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setenv("TINY_SPEED", "9")
    assert main(BASE) == 0
    assert "TINY_SPEED has no effect: speed is what it is" in capsys.readouterr().err


def test_defaults_are_below_what_is_typed_and_errors_name_their_source(
    install: Install,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("lab_defaults")
    lab = tmp_path / "lab.json"
    monkeypatch.setenv("LAB", str(lab))
    flags = flags_of(here, output_path=tmp_path / "out", max_steps=1)
    words = [f"--{name}={value}" for name, value in flags.items()]
    words.append("--overwrite")
    lab.write_text(json.dumps({"tiny": {"learning_rate": "0.5"}}))
    for more, rate in (([], 0.5), (["--learning_rate=0.25"], 0.25)):
        assert main([*words, *more]) == 0
        assert log(tmp_path / "out")[0]["learning_rate"] == rate
    for option, value in (("learning_rate", "fast"), ("lerning_rate", "0.5")):
        lab.write_text(json.dumps({"tiny": {option: value}}))
        assert main(words) == 2
        assert f"the lab's lab.json:{option}: " in capsys.readouterr().err
    lab.write_text("[]")
    assert main(words) == 2
    assert "plugin third-lab_defaults 1.0" in capsys.readouterr().err
    assert main(["train", "--help"]) == 0


def picture(here: Path, out: Path, *words: str) -> bytes:
    """The pixels of the image that `generate` makes of the project's model and a LoRA file."""
    models = flags_of(here)["model_paths"]
    told = ["--model=tiny", f"--model_paths={models}", "--prompt=dog", "--seed=1"]
    assert main(["generate", *told, *words, f"--output={out}"]) == 0
    with Image.open(out) as image:
        return image.tobytes()


def test_a_format_of_lora_files_is_written_and_read(
    install: Install, here: Path, tmp_path: Path
) -> None:
    install("studio_format")
    install("lora_choices", "dstrain.options", "LoraChoices")
    given = {"max_steps": 2, "lora_alpha": 4.0, "learning_rate": 0.1}
    pictures = []
    for name in ("diffusers", "studio"):
        train(here, output_path=tmp_path / name, lora_format=name, **given)
        (path,) = (tmp_path / name).glob("*.safetensors")
        pictures.append(picture(here, tmp_path / f"{name}.png", f"--lora={path}"))
    tensors = load_file(path)
    assert {key.rpartition("/")[2] for key in tensors} == {"in", "out", "strength"}
    # As another program would have written it.
    for key, tensor in tensors.items():
        tensor.mul_({"in": 1.0, "out": 0.5, "strength": 2.0}[key.rpartition("/")[2]])
    foreign = tmp_path / "foreign.safetensors"
    save_file(tensors, foreign)
    pictures.append(picture(here, tmp_path / "foreign.png", f"--lora={foreign}"))
    assert len(set(pictures)) == 1
    assert pictures[0] != picture(here, tmp_path / "plain.png")
    save_file({**tensors, "studio/blocks.0.to_q/up": torch.ones(1)}, foreign)
    with pytest.raises(StateError, match="is of no layer"):
        train(here, output_path=tmp_path / "bad", preset_lora_path=foreign, **given)


def test_a_type_of_layers_is_trained_resumed_and_generated_with(
    install: Install, here: Path, tmp_path: Path
) -> None:
    install("hra_type")
    install("lora_choices", "dstrain.options", "LoraChoices")
    given = {"lora_type": "hra", "learning_rate": 0.1}
    whole = train(here, output_path=tmp_path / "whole", max_steps=3, **given)
    parts = train(here, output_path=tmp_path / "parts", max_steps=1, **given)
    train(here, output_path=parts, max_steps=3, resume="auto", **given)
    assert log(parts) == log(whole)
    (path,) = whole.glob("*.safetensors")
    tensors = load_file(path)
    assert all(key.endswith(".hra_u") for key in tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata()["type"] == "hra"
    made = picture(here, tmp_path / "made.png", f"--lora={path}")
    assert made != picture(here, tmp_path / "plain.png")
    # It continues from its own file, whose layers are what was trained.
    start = {**given, "lora_checkpoint": path, "learning_rate": 1e-30}
    again = train(here, output_path=tmp_path / "again", max_steps=1, **start)
    ((_, same),) = files(again).items()
    assert all(torch.equal(same[key], tensors[key]) for key in tensors)
    for bad in ({"lora_alpha": 4.0}, {"lora_rank": "2,*to_q=4"}):
        with pytest.raises(UsageError, match="one rank"):
            train(here, output_path=tmp_path / "bad", max_steps=1, **given, **bad)


def test_a_keeper_keeps_the_weights_of_a_component_on_disk(
    install: Install, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("disk_keeper")
    install("disk_options", "dstrain.options", "DiskOptions")
    rounded = project(tmp_path / "rounded")
    for path in (rounded / "model/transformer").glob("*.safetensors"):
        weights = load_file(path)
        for key, weight in weights.items():
            weights[key] = weight.half().float() if weight.ndim == 2 else weight
        save_file(weights, path)
    train(here, output_path=tmp_path / "disk", on_disk="dit", max_steps=2)
    assert log(tmp_path / "disk") == log(train(rounded, max_steps=2))
    train(here, output_path=tmp_path / "plain", max_steps=2)
    assert log(tmp_path / "disk") != log(tmp_path / "plain")
    on = {"max_steps": 3, "resume": "auto"}
    for other in ({}, {"on_disk": "dit,text_encoder"}):
        with pytest.raises(StateError, match="disk"):
            train(here, output_path=tmp_path / "disk", **on, **other)
    with monkeypatch.context() as patch, pytest.raises(StateError, match="saved"):
        patch.setattr("disk_keeper.Disk.identity", lambda *_: Identity("disk", 1))
        train(here, output_path=tmp_path / "disk", on_disk="dit", **on)
    plans = []
    for name in (None, "dit", "text_encoder"):
        cache = tmp_path / f"cache {name}"
        train(here, task=STAGE_1, feature_cache=cache, on_disk=name)
        plans.append(plan_digests(cache).keys())
    assert plans[0] == plans[1] != plans[2]
    stage_2 = {"task": "sft:train", "feature_cache": cache, "max_steps": 1}
    with pytest.raises(StateError, match="weights of text_encoder on disk"):
        train(here, output_path=tmp_path / "no", **stage_2)
    train(here, output_path=tmp_path / "yes", on_disk="text_encoder", **stage_2)
    with pytest.raises(UsageError, match="is no component"):
        train(here, output_path=tmp_path / "bad", on_disk="unet", max_steps=1)
