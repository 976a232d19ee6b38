"""The value of --model_id is a path or a published model, and never a guess."""

from dataclasses import replace
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.errors import MissingFiles
from dstrain.models import ModelSource
from dstrain.models.naming.location import located

from tests.support.family import MODEL


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for tool in ("DSTRAIN", "DIFFSYNTH"):
        monkeypatch.delenv(f"{tool}_MODEL_BASE_PATH", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("value", "model_id", "revision"),
    [
        ("Tiny/Tiny", "Tiny/Tiny", ""),
        ("Tiny/Tiny@v1.0", "Tiny/Tiny", "v1.0"),
        ("Some-One/FLUX.1_x@refs/pr/1", "Some-One/FLUX.1_x", "refs/pr/1"),
    ],
)
def test_an_id_is_a_published_model(value: str, model_id: str, revision: str) -> None:
    assert located(value, [MODEL]) == ModelSource(model_id, revision)


@pytest.mark.parametrize(
    "value", ["model", "./Tiny/Tiny", "models/mine", "a/b/c.safetensors", "Tiny/"]
)
def test_a_path_that_exists_is_itself(value: str, here: Path) -> None:
    path = here / value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir()
    assert located(value, [MODEL]) == Path(value)
    assert located(str(path), [MODEL]) == path


def test_a_known_id_that_is_a_path_too_is_refused_and_says_how_to_name_either(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "Tiny/Tiny").mkdir(parents=True)
    with pytest.raises(UsageError, match="--model_id: Tiny/Tiny ") as caught:
        located("Tiny/Tiny", [MODEL])
    assert "./Tiny/Tiny" in caught.value.help_lines[0]
    assert located("./Tiny/Tiny", [MODEL]) == Path("Tiny/Tiny")
    # One that fits a pattern of ids may be anyone's own.
    knowing = replace(MODEL, model_ids={"base": ("*/*pony*", "mine/base")})
    (here / "mine/my-pony").mkdir(parents=True)
    assert located("mine/base", [knowing]) == ModelSource("mine/base")
    assert located("mine/my-pony", [knowing]) == Path("mine/my-pony")
    assert located("its/pony", [knowing]) == ModelSource("its/pony")
    assert located("mine/pony@main", [knowing]) == ModelSource("mine/pony", "main")
    with pytest.raises(MissingFiles):
        located("mine/pony.safetensors", [knowing])
    # Of a family that is not asked it is only a path.
    assert located("Tiny/Tiny", []) == Path("Tiny/Tiny")
    # The folder of the published model itself is no other.
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", ".")
    assert located("Tiny/Tiny", [MODEL]) == ModelSource("Tiny/Tiny")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("Tiny", "'Tiny/Tiny'"),
        ("./nothing", "./nothing: "),
        ("a/b/c.safetensors", "a/b/c.safetensors: "),
        ("Tiny/Tiny:vae/*", "'Tiny/Tiny'"),
        ("models/mine", "models/mine: "),
        ("there/mine", "there/mine: "),
    ],
)
def test_neither_is_refused_with_a_near_id(value: str, hint: str, here: Path) -> None:
    (here / "there").mkdir()
    with pytest.raises(MissingFiles, match=f"{hint}(?s:.*)OWNER/NAME"):
        located(value, [MODEL])
