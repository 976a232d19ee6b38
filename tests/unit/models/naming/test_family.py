"""Without --model the family is the only one that a model can be of; else the candidates are
named.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.cli.main import main
from dstrain.errors import MissingFiles
from dstrain.models.naming import family_of

from tests.support.family import write

Install = Callable[..., Path]
Source = Callable[..., str]
REAL = ("flux", "qwen_image", "wan")
pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("Tiny/Tiny", "tiny"),
        ("Tiny/Other-2@v1", "tiny"),
        ("Qwen/Qwen-Image-Edit-2509", "qwen_image"),
        ("Wan-AI/Wan2.1-T2V-1.3B", "wan"),
        ("AI-ModelScope/FLUX.1-dev", "flux"),
    ],
)
def test_a_listed_id_is_of_one_family(value: str, name: str) -> None:
    family = family_of(value)
    assert family is not None
    assert family.name == name


def test_a_folder_is_told_by_its_index_or_its_keys(tmp_path: Path) -> None:
    write(tmp_path / "model")
    assert family_of(str(tmp_path / "model"), in_help=True) is None
    found = family_of(str(tmp_path / "model"))
    assert found is not None
    assert found.name == "tiny"
    index = tmp_path / "model/model_index.json"
    for content in ("{", "[]", "{}", json.dumps({"_class_name": ["x"]})):
        index.write_text(content)
        assert family_of(str(tmp_path / "model"), in_help=True) is None
    index.write_text(json.dumps({"_class_name": "WanPipeline"}))
    found = family_of(str(tmp_path / "model"), in_help=True)
    assert found is not None
    assert found.name == "wan"


def test_an_unlisted_id_names_the_nearest_and_what_to_type() -> None:
    with pytest.raises(
        UsageError, match="did you mean 'Qwen/Qwen-Image-2512'"
    ) as caught:
        family_of("Qwen/Qwen-Image-2521")
    (advice,) = caught.value.help_lines
    assert "give --model" in advice
    assert "flux, qwen_image, tiny, wan" in advice
    with pytest.raises(MissingFiles, match="did you mean 'Qwen/Qwen-Image'"):
        family_of("Qwen-Image")


def test_weights_of_no_family_and_those_of_several_are_refused(
    fake_plugin: Install, family_source: Source, tmp_path: Path
) -> None:
    source = family_source(
        "twin",
        components="'tests.support.family:COMPONENTS'",
        model_files="{'Tiny/Tiny': {}}",
    )
    fake_plugin("plugin-twin", {"twin": "twin_record:MODEL"}, {"twin_record": source})
    write(tmp_path / "model")
    for value in ("Tiny/Tiny", str(tmp_path / "model")):
        with pytest.raises(UsageError, match="several families: tiny, twin") as caught:
            family_of(value, REAL)
        assert caught.value.where == "--model"
    file = tmp_path / "model/text_encoder/model-1-of-1.safetensors"
    with pytest.raises(UsageError, match="has no weights of an installed family"):
        family_of(str(file), ("tiny", "twin"))


@pytest.mark.parametrize(
    "fault", ["import gone_module", "1 / 0", "import sys\nsys.exit(0)"]
)
def test_a_broken_plugin_harms_no_other_and_is_named_where_none_fits(
    fault: str,
    fake_plugin: Install,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_plugin("plugin-bad", {"bad": "bad_record:MODEL"}, {"bad_record": fault})
    # Another family is enough; the import of `tiny` takes longest.
    others = ("flux", "qwen_image", "tiny")
    found = family_of("Wan-AI/Wan2.1-T2V-1.3B", others)
    assert found is not None
    assert found.name == "wan"
    disabled = [word for name in others for word in ("-p", f"no:{name}")]
    assert main(["graph", "--model_id", "No/Such", *disabled]) == 2
    assert "bad is left out, since it is broken" in capsys.readouterr().err


def test_a_disabled_plugin_is_not_asked() -> None:
    with pytest.raises(UsageError, match="no installed family lists Tiny/Tiny"):
        family_of("Tiny/Tiny", ("tiny",))
