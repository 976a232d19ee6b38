"""A family's record: it finds its variants' specs and says what is wrong with it."""

from dataclasses import replace
from pathlib import Path

import pytest
from dstrain import UsageError

from tests.support.family import MODEL


def test_a_variant_without_a_spec_is_refused() -> None:
    with pytest.raises(UsageError, match=r"plugin tiny: .*'third'"):
        MODEL.spec("third")
    for place in ("tests.support.family:BASE", "tests.support.family:GONE"):
        with pytest.raises(UsageError, match=f"plugin tiny: .*{place}"):
            replace(MODEL, pipelines=place).spec("base")


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "1 / 0"])
def test_pipelines_that_cannot_be_imported_are_an_error_of_the_plugin(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        replace(MODEL, pipelines="leaving:PIPELINES").spec("base")
    assert caught.value.where == "plugin tiny"


def test_known_models_are_those_listed_and_patterns_that_mean_more() -> None:
    assert MODEL.known_models == {"Tiny/Tiny": "", "Tiny/Other*": "other"}
    listed = replace(MODEL, model_files={"Tiny/Other-1": {}})
    assert listed.known_models == {"Tiny/Other-1": "other"}
    assert MODEL.variants_of("Tiny/Other-1") == ["other"]
    known = [MODEL.knows(f"Tiny/{name}") for name in ("Tiny", "Other-1", "Third")]
    assert known == [True, True, False]
    both = {"base": ("Tiny/B*",), "other": ("Tiny/*",)}
    listed = replace(MODEL, model_files={"Tiny/Both": {}}, model_ids=both)
    assert listed.known_models == {"Tiny/Both": "base, other"}
    told = replace(MODEL, unsupported_models={"third": ("Tiny/Third",)})
    assert told.unsupported(["a", "Tiny/Third"]) == "third"
    assert told.knows("Tiny/Third")
