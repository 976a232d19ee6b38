"""A family's record: it finds its variants' specs and says what is wrong with it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from dstrain import UsageError

from tests.support import family
from tests.support.family import MODEL


def test_the_spec_of_a_variant_has_the_names_of_family_and_variant() -> None:
    spec = MODEL.spec("other")
    assert (spec.family, spec.variant, spec.where) == ("tiny", "other", "tiny other")


def test_a_variant_without_a_spec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "PIPELINES", {"base": family.BASE})
    with pytest.raises(
        UsageError, match=r"plugin tiny: its pipelines, .* no variant 'other'"
    ):
        MODEL.spec("other")
    monkeypatch.setattr(family, "PIPELINES", SimpleNamespace())
    with pytest.raises(UsageError, match="expected a dict of PipelineSpec by variant"):
        MODEL.spec("base")


def test_problems_and_missing_targets_are_reported() -> None:
    assert list(MODEL.problems()) == []
    assert list(MODEL.missing_targets()) == []
    (problem,) = replace(MODEL, variants="base").problems()
    assert problem == "its field variants is a str, not a tuple"
    (missing,) = replace(MODEL, toy="nowhere.at_all:write").missing_targets()
    assert "its toy, 'nowhere.at_all:write', does not exist" in missing


def test_mappings_of_a_record_are_frozen() -> None:
    targets = {"dit": ("to_q",)}
    record = replace(MODEL, lora_targets=targets)
    targets.clear()
    assert dict(record.lora_targets) == {"dit": ("to_q",)}
    with pytest.raises(TypeError):
        record.lora_targets["vae"] = ()  # type: ignore[index]  # what is tested


def test_known_models_are_those_listed_and_patterns_that_mean_more() -> None:
    assert MODEL.known_models == {"Tiny/Tiny": "", "Tiny/Other*": "other"}
    listed = replace(MODEL, model_files={"Tiny/Other-1": {}})
    assert listed.known_models == {"Tiny/Other-1": "other"}
    assert MODEL.variants_of("Tiny/Other-1") == ["other"]
    assert [MODEL.knows(f"Tiny/{name}") for name in ("Tiny", "Other-1", "Third")] == [
        True,
        True,
        False,
    ]
