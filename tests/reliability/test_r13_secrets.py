"""Secrets that can be known as such are in no byte that is written and in no line that
is printed.
"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from dstrain.cli.main import main
from dstrain.console import redacted

from tests.support.runs import project

pytestmark = pytest.mark.promise(
    "R13", "secrets are in no written byte and no printed line"
)
HEX = "5f1d7a3c9b2e4806a7c1d9e3f5b70214"
JWT = "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF"
SIGNED = f"https://example.com/a.png?X-Amz-Date=1&X-Amz-Signature={HEX}&x=1"


@dataclass(frozen=True)
class Planted:
    """A secret, and where it is put: the environment, flags, the file of --config, or
    the metadata's first image.

    code: how the run ends. shown: whether what is printed or written shows that
    something was taken out.
    """

    secret: str
    environment: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    config: str = ""
    image: str = ""
    code: int = 0
    shown: bool = True


def variable(name: str, secret: str) -> Planted:
    """A variable that the run needs nothing of."""
    return Planted(secret, ((name, secret),), shown=False)


CASES: tuple[tuple[str, Planted], ...] = (
    ("HF_TOKEN", variable("HF_TOKEN", "hf_AbCdEfGhIjKlMnOpQrStUv")),
    ("MODELSCOPE_API_TOKEN", variable("MODELSCOPE_API_TOKEN", "ms-12345678-90ab-cdef-1234-567890abcdef")),
    ("WANDB_API_KEY", variable("WANDB_API_KEY", HEX)),
    ("AWS_SECRET_ACCESS_KEY", variable("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")),
    ("A_SERVICE_KEY", variable("A_SERVICE_KEY", "k3y-of-a-service")),
    ("SMTP_PASS", variable("SMTP_PASS", "pa55-of-mail")),
    ("db_password", variable("db_password", "'quoted' \"pa55\" wörd")),
    ("CLIENT_SECRET", variable("CLIENT_SECRET", "s3cret@client")),
    ("key of the environment, in a folder's name",
     Planted("k3y-of-a-service", (("A_SERVICE_KEY", "k3y-of-a-service"),), ("--dataset_root", "k3y-of-a-service"))),
    ("pass of the environment, in the names of layers",
     Planted("nothing-55-pass", (("SMTP_PASS", "nothing-55-pass"),), ("--lora_target_modules", "to_q,nothing-55-pass"),
             code=2)),
    ("password with a quote in a URL of a flag",
     Planted("s3cr3t'w0rd", flags=("--dataset_metadata_path", "https://ann:s3cr3t'w0rd@example.com/a.csv"), code=2)),
    ("password with an @ in a URL of a flag",
     Planted("s3cr3t@w0rd", flags=("--dataset_metadata_path", "https://ann:s3cr3t@w0rd@example.com/a.csv"), code=2)),
    ("token of the environment, in a folder's name", Planted(HEX, (("WANDB_API_KEY", HEX),), ("--dataset_root", HEX))),
    ("token in a folder's name, with trackers",
     Planted("hf_xBcDeFgHiJkLmNoPqRsTu", (("WANDB_MODE", "offline"),),
             ("--dataset_root", "hf_xBcDeFgHiJkLmNoPqRsTu", "--report_to", "tensorboard,wandb"))),
    ("token in a folder's name",
     Planted("hf_aBcDeFgHiJkLmNoPqRsTu", flags=("--dataset_root", "hf_aBcDeFgHiJkLmNoPqRsTu"))),
    ("password of the environment, typed in a wrong flag",
     Planted("pa55word-Long", (("DB_PASSWORD", "pa55word-Long"),), ("--extra_inputs", "pa55word-Long"), code=2)),
    ("user and password in a URL of a flag",
     Planted("s3cr3t-w0rd", flags=("--dataset_metadata_path", "https://ann:s3cr3t-w0rd@example.com/a.csv"), code=2)),
    ("token in the query of a flag",
     Planted("tok-987-abc", code=3,
             flags=("--lora_checkpoint", "https://e.com/a.safetensors?access_token=tok-987-abc"))),
    ("token in the path of weights to start from",
     Planted("ghp_0123456789abcdefghijABCDEF", code=3,
             flags=("--resume_from_checkpoint", "ghp_0123456789abcdefghijABCDEF/a.safetensors"))),
    ("key of a file that is no flag",
     Planted("plain-secret-3", config='hf_token = "plain-secret-3"', code=2, shown=False)),
    ("value of a file of a wrong type", Planted("sk-abcdefghijklmnopqrstuvwx",
                                                config='seed = "sk-abcdefghijklmnopqrstuvwx"', code=2)),
    ("line of a file that cannot be read",
     Planted("plain-secret-4", config='token = "plain-secret-4', code=2, shown=False)),
    ("folder in a file", Planted("AKIAABCDEFGHIJKLMNOP", config='dataset_root = ["AKIAABCDEFGHIJKLMNOP"]')),
    ("signature in a URL of the metadata", Planted(HEX, image=SIGNED, code=2, shown=False)),
    ("token in a traceback",
     Planted(JWT, flags=("--variant", JWT), code=2)),
)  # fmt: skip


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "planted", [planted for _, planted in CASES], ids=[name for name, _ in CASES]
)
def test_it_is_in_no_byte_that_is_written_and_no_line_that_is_printed(
    planted: Planted,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = project(tmp_path / "project")
    monkeypatch.chdir(place)
    for name, value in planted.environment:
        monkeypatch.setenv(name, value)
    rows = json.loads((place / "data/metadata.json").read_text())
    rows[0]["image"] = planted.image or rows[0]["image"]
    (place / "data/metadata.json").write_text(json.dumps(rows))
    (place / "run.toml").write_text(planted.config)
    (place / planted.secret).mkdir(parents=True)
    inputs = {path for path in place.rglob("*") if path.is_file()}
    train = ["--config", "run.toml", "--model", "tiny", "--toy"]
    train += ["--dataset_base_path", "data", "--lora_rank", "2"]
    given = [*train, *planted.flags]
    out = ["--output_path", "out"]
    whole = [*given, *out, "--max_steps", "1", "--debug"]
    # Trackers can read it there.
    monkeypatch.setattr(sys, "argv", ["dstrain", *whole])
    assert main(whole) == planted.code
    assert main(whole) in (2, 3)  # refused: the folder holds a run
    assert main([*whole, "--resume", "--seed", "9"]) in (0, 2, 3)
    assert main([*given, *out, "--dry_run"]) in (0, 2, 3)
    if not planted.code:
        cache = [*given, "--feature_cache", "cache", "--debug", "--task"]
        assert main([*cache, "sft:data_process"]) == 0
        stage_2 = ["sft:train", "--output_path", "out2", "--max_steps", "1"]
        assert main([*cache, *stage_2]) == 0
        lora = next((place / "out").glob("*.safetensors"))
        words = f"--lora {lora} --num_inference_steps 1 --output x.png".split()
        prompt = ["--prompt", planted.secret]
        assert main(["generate", "--model", "tiny", "--toy", *words, *prompt]) == 0
    printed = capfd.readouterr()
    written = {
        path: path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path not in inputs
    }
    assert planted.secret not in printed.out + printed.err
    assert [
        path for path, content in written.items() if planted.secret.encode() in content
    ] == []
    assert not any(planted.secret in path.name for path in written)
    assert (
        not planted.shown
        or "***" in printed.out + printed.err
        or any(b"***" in content for content in written.values())
    )


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("dataset", [False, True], ids=["one", "dataset"])
def test_what_generate_says_has_no_secret(
    dataset: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "hf_AbCdEfGhIjKlMnOpQrStUv"
    words = ["generate", "--model", "tiny", "--toy", "--num_inference_steps", "1"]
    words += ["--height", "16", "--width", "16"]
    if dataset:
        table = tmp_path / "hf_AbCdEfGhIjKlMnOpQrStUw.csv"
        table.write_text("prompt,seed,remark\na dog,1,good\n")
        words += ["--dataset", str(table), "--output", str(output)]
    else:
        words += ["--prompt", "a dog", "--output", str(output / "x.png")]
    assert main(words) == 0
    printed = capfd.readouterr()
    assert "/***" in printed.out + printed.err
    assert "hf_" not in printed.out + printed.err


def test_what_is_no_secret_is_left_as_it_is() -> None:
    environment = {
        "TOKENIZERS_PARALLELISM": "false-or-so",
        "HF_TOKEN": "short",
        "HOME": "/home/somebody",
    }
    for text in (
        "a prompt: dogs & cats at 5; see a@b.c, key=1", "https://example.com/a.png?width=512&height=512",
        "/data/tokenizers/tokenizer.json false-or-so short /home/somebody", "ms-dos, hf_hub, sk-learn, Bearer of news",
        "Qwen/Qwen-Image:transformer/*.safetensors", "out/token=1/secret/a.safetensors",
    ):  # fmt: skip
        assert redacted(text, environment) == text


VARIABLES = [
    "MY_KEY",
    "MY_PASS",
    "MY_PASSWORD",
    "MY_SECRET",
    "MY_TOKEN",
    "my_key",
    "My_Pass",
]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("place", ["prompt", "image"])
def test_a_row_with_the_value_of_a_variable_is_refused_before_it_is_stored(
    name: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    secret = "v4lue-of-it"
    monkeypatch.setenv(name, secret)
    rows = json.loads(Path("data/metadata.json").read_text())
    image = Path("data") / rows[1]["image"]
    image.rename(image.with_name(f"{secret}.png"))
    rows[1]["image"] = f"{secret}.png"
    if place == "prompt":
        image.with_name(f"{secret}.png").rename(image)
        rows[1] |= {"image": image.name, "prompt": f"a dog {secret}"}
    Path("data/metadata.json").write_text(json.dumps(rows))
    words = ["--model", "tiny", "--toy", "--dataset_base_path", "data"]
    words += ["--lora_rank", "2"]
    store = ["--task", "sft:data_process", "--feature_cache", "cache"]
    inputs = set(Path().rglob("*"))
    assert main([*words, *store]) == 2
    said = capfd.readouterr().err
    assert f"metadata.json:2:{place}" in said.replace("input_image", "image")
    assert f"environment variable {name}" in said
    # Training in a single run stores no row.
    assert main([*words, "--output_path", "out", "--max_steps", "1"]) == 0
    prompts = ["--preview_prompt", "a dog", f"--preview_prompt=a sign: {secret}"]
    assert main([*words, "--output_path", "new", *prompts]) == 2
    for path in set(Path().rglob("*")) - inputs:
        assert not path.is_file() or secret.encode() not in path.read_bytes()
    printed = capfd.readouterr()
    assert secret not in said + printed.out + printed.err
    monkeypatch.delenv(name)
    assert main([*words, *store]) == 0


def test_short_values_and_folders_that_look_like_keys_are_left_as_they_are() -> None:
    environment = {"MY_KEY": "train", "MY_PASS": "1234567", "MONKEY": "monkey-business"}
    for text in (
        "train 1234567 monkey-business",
        "/data/sk-experiments-of-last-summer/a.png",
        "/data/sk-learn-models_of_the_long_winter",
    ):
        assert redacted(text, environment) == text


@pytest.mark.parametrize(
    "written", [json.dumps, repr, quote, shlex.quote, lambda one: " ".join(one.split())]
)
def test_it_is_known_as_it_is_written(written: Callable[[str], str]) -> None:
    value = 'it\'s\n a  "key"'
    left = redacted(f"[{written(value)}]", {"SOME_TOKEN": value})
    assert "key" not in left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://u:p@h/x", "https://***@h/x"),
        ("s3://tok@h", "s3://***@h"),
        ("https://u:p@w'x@h/y", "https://***@h/y"),
        ("sk-proj-abcdefghij0123456789_x-y z", "*** z"),
        ("h?a=1&token=x&b=2", "h?a=1&token=***&b=2"),
        *((f"h?{name}=x", f"h?{name}=***") for name in ("sig", "key", "auth")),
        *((f"{name}{'0' * 20} x", "*** x") for name in ("gho_", "ghs_", "github_pat_")),
        (f"ASIA{'0' * 16} x", "*** x"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer ***"),
    ],
)
def test_only_the_secret_is_taken_out(text: str, left: str) -> None:
    assert redacted(text, {}) == left
