"""Without --model the family is the only one that a model can be of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, UsageError
from dstrain.cli.main import main
from dstrain.errors import MissingFiles
from dstrain.installed import installed
from dstrain.models import components_of
from dstrain.models.naming import family_of
from dstrain.registry import load_family
from safetensors.torch import save_file

Install = Callable[..., Path]
Source = Callable[..., str]
REAL = tuple(one.name for one in installed())
pytestmark = pytest.mark.usefixtures("tiny")


def named(value: str | Path, *disabled: str, **given: Any) -> str:
    """The name of a model's family; '' where only its keys would tell it."""
    found = family_of(str(value), disabled, **given)
    return "" if found is None else found.name


@pytest.mark.parametrize("value", ["Tiny/Tiny", "Tiny/Other-2@v1"])
def test_a_listed_id_is_of_one_family(value: str) -> None:
    assert named(value) == "tiny"


@pytest.mark.parametrize("name", REAL)
def test_a_toy_of_each_family_is_told_whole_and_by_its_denoiser_alone(
    name: str, tmp_path: Path
) -> None:
    family = load_family(name)
    family.load("toy")(tmp_path, family.variants[0], 0)
    (tmp_path / "model_index.json").unlink(missing_ok=True)
    denoiser = components_of(family)[family.default_trainable].folder
    assert named(tmp_path) == named(tmp_path / denoiser) == name


def test_an_unlisted_id_names_the_nearest_and_what_to_type() -> None:
    with pytest.raises(UsageError, match="'Tiny/Tiny'") as caught:
        family_of("Tiny/Tinny")
    (advice,) = caught.value.help_lines
    assert "--model" in advice and ", ".join(sorted((*REAL, "tiny"))) in advice
    with pytest.raises(MissingFiles, match="'Tiny/Tiny'"):
        family_of("Tiny")
    # A disabled plugin is not asked.
    with pytest.raises(UsageError, match="Tiny/Tiny"):
        family_of("Tiny/Tiny", ("tiny",))


def test_weights_of_no_family_and_those_of_several_are_refused(
    fake_plugin: Install, family_source: Source, model: Path
) -> None:
    part = model / "text_encoder/model-1-of-1.safetensors"
    assert named(part, *REAL) == "tiny"
    fields = {
        "components": "'tests.support.family:COMPONENTS'",
        "model_files": "{'Tiny/Tiny': {}}",
    }
    source = family_source("twin", **fields)
    fake_plugin("plugin-twin", {"twin": "twin_record:MODEL"}, {"twin_record": source})
    for value in ("Tiny/Tiny", model, part):
        with pytest.raises(UsageError, match=": tiny, twin;") as caught:
            family_of(str(value), REAL)
        assert caught.value.where == "--model"
    with pytest.raises(UsageError, match=f"--model_id: {part} "):
        family_of(str(part), (*REAL, "tiny", "twin"))
    damaged = model / "damaged.safetensors"
    save_file({"a": torch.zeros(4)}, damaged)
    damaged.write_bytes(damaged.read_bytes()[:-4])
    with pytest.raises(StateError, match=r"damaged\.safetensors"):
        family_of(str(damaged))


@pytest.mark.parametrize(
    "fault",
    ["import gone_module", "1 / 0", "import sys\nsys.exit(0)", "components='no:where'"],
)
def test_a_broken_plugin_harms_no_other_and_is_named_where_none_fits(
    fault: str,
    fake_plugin: Install,
    family_source: Source,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_late = fault.startswith("components")
    source = family_source("bad", components="'no:where'") if is_late else fault
    fake_plugin("plugin-bad", {"bad": "bad_record:MODEL"}, {"bad_record": source})
    if is_late:
        assert named(model, *REAL) == "tiny"
        return
    assert named("Tiny/Tiny", *REAL) == "tiny"
    disabled = [f"-pno:{name}" for name in (*REAL, "tiny")]
    assert main(["graph", "--model_id", "No/Such", *disabled]) == 2
    assert "bad " in capsys.readouterr().err
