"""Flags name components, or files as the model flags have them; what they cannot mean is
refused before anything is loaded.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError, run
from dstrain.graph import Plan
from dstrain.models.execution import Kept, StoredLayers
from dstrain.models.quantization.methods import FP8, INT8_BLOCK
from dstrain.pipeline import storage_options
from dstrain.plugin import QuantizationMethod
from dstrain.runs.resolve import resolve

from tests.support.family import IDS, weights_of
from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def kept(here: Path, **flags: Any) -> dict[str, Kept]:
    return dict(resolve(config(here, **flags)).kept)


def fp8(*names: str) -> dict[str, Kept]:
    return dict.fromkeys(names, Kept((StoredLayers(FP8),)))


def refusal(here: Path, **flags: Any) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(config(here, **flags))
    return str(caught.value)


def test_nothing_is_kept_in_another_way_without_the_flags(here: Path) -> None:
    assert kept(here) == {}


def test_components_are_named(here: Path) -> None:
    assert kept(here, fp8_models="dit, text_encoder") == fp8("dit", "text_encoder")
    options = "dit:fp8/to_q;dit:int8_block@to_q;text_encoder:fp8"
    assert kept(here, quant_options=options) == {
        "dit": Kept(
            (StoredLayers(FP8, (), ("to_q",)), StoredLayers(INT8_BLOCK, ("to_q",)))
        ),
        **fp8("text_encoder"),
    }
    both = kept(here, fp8_models="dit", quant_options="dit:fp8")
    assert both == fp8("dit")


def test_files_are_named_as_the_model_flags_have_them(
    here: Path, tmp_path: Path
) -> None:
    # Of two files of one component, each names it; of one in no folder, its content.
    for path in weights_of(here / "model")["dit"]:
        assert kept(here, fp8_models=str(path)) == fp8("dit")
    (encoder,) = weights_of(here / "model")["text_encoder"]
    lonely = shutil.copy(encoder, tmp_path / "model.safetensors")
    others = [weights_of(here / "model")[name] for name in ("dit", "vae")]
    paths = json.dumps([*others, str(lonely)])
    found = kept(here, fp8_models=str(lonely), model_paths=paths)
    assert found == fp8("text_encoder")


def test_published_files_are_named_as_the_model_flags_have_them(here: Path) -> None:
    entry = IDS.split(",")[0]
    flags: dict[str, Any] = {
        "model_paths": None,
        "model_id_with_origin_paths": IDS,
        "dry_run": True,
    }
    assert kept(here, quant_options=f"{entry}:fp8", **flags) == fp8("dit")
    short = {**flags, "model_id_with_origin_paths": None, "model_id": "Tiny/Tiny"}
    assert kept(here, fp8_models=entry, **short) == fp8("dit")
    pinned = entry.replace(":", "@v1:", 1)
    flags["model_id_with_origin_paths"] = IDS.replace(entry, pinned)
    assert kept(here, fp8_models=pinned, **flags) == fp8("dit")
    assert "no entry of the model flags; did you mean" in refusal(
        here, fp8_models=entry, **flags
    )


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"fp8_models": "ditt"}, "no component of tiny base and no entry of the model flags; did you mean 'dit'?"),
        ({"fp8_models": "tokenizer"}, "--fp8_models: has no effect: tokenizer has no weights"),
        ({"quant_options": "dit:nf4"}, "--quant_options: no method named 'nf4'; did you mean 'bitsandbytes_nf4'?"),
        ({"quant_options": "dit:torchao_int8_w8a8"}, "torchao_int8_w8a8 is not supported: it quantizes"),
        ({"fp8_models": "dit", "trainable_models": "dit"}, "--fp8_models: dit is trained (--trainable_models dit)"),
        ({"fp8_models": "dit", "quant_options": "vae:fp8", "trainable_models": "dit"}, "--fp8_models: dit is trained"),
        ({"quant_options": "dit:fp8@to_q", "trainable_models": "dit.blocks.0"}, "(--trainable_models dit.blocks.0)"),
        ({"quant_options": "dit:fp8@to_qq"}, "no linear layer of dit matches 'to_qq'; did you mean 'to_q'?"),
        ({"quant_options": "dit:fp8/to_qq"}, "no linear layer of dit matches 'to_qq'; did you mean 'to_q'?"),
        ({"quant_options": "dit:fp8;dit:int8_block@to_q"}, "both dit:fp8 and dit:int8_block@to_q quantize blocks.0"),
        ({"quant_options": "vae:fp8"}, "vae has no linear layer that can be quantized"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_flags_cannot_mean_is_refused_in_words(
    flags: dict[str, Any], what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dry_run in (True, False):
        with pytest.raises(UsageError) as caught:
            run(config(here, dry_run=dry_run, **flags))
        assert what in str(caught.value)
    assert not (here / "out").exists() or not list((here / "out").glob("*.safetensors"))


def test_what_a_run_records_names_components(here: Path) -> None:
    (encoder,) = weights_of(here / "model")["text_encoder"]
    options = "dit:fp8/to_q;dit:int8_block@to_q"
    setup = resolve(config(here, fp8_models=str(encoder), quant_options=options))
    assert storage_options(setup.kept) == {
        "fp8_models": "text_encoder",
        "quant_options": options,
    }
    recorded = setup.recorded
    assert dict(resolve(recorded).kept) == dict(setup.kept)
    assert setup.config.fp8_models == str(encoder)


def test_a_component_that_no_stage_loads_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = {"": ["dit", "text_encoder"], "train": ["dit"]}
    monkeypatch.setattr(Plan, "components", loads)
    assert (
        "--fp8_models: has no effect: vae is not loaded\n  it loads dit, text_encoder"
        in refusal(here, fp8_models="vae")
    )
    assert kept(here, fp8_models="text_encoder") == fp8("text_encoder")


def offering(monkeypatch: pytest.MonkeyPatch, method: QuantizationMethod) -> None:
    """As if a plugin offered this method."""
    monkeypatch.setattr(
        "dstrain.registry.hooks.Extensions.offered",
        lambda self, hook, *_: (
            {method.name: method} if hook == "dstrain_quantizers" else {}
        ),
    )


def test_a_method_of_a_plugin_is_used_and_refused_where_it_gives_no_gradient(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offering(monkeypatch, QuantizationMethod("own", FP8.store, FP8.stored_bytes))
    assert [*kept(here, quant_options="dit:own")] == ["dit"]
    blocked = QuantizationMethod(
        "own", FP8.store, FP8.stored_bytes, gives_gradient=False
    )
    offering(monkeypatch, blocked)
    assert [*kept(here, quant_options="text_encoder:own")] == ["text_encoder"]
    assert (
        "--quant_options: own gives no gradient, and training steps use dit"
        in refusal(here, quant_options="dit:own")
    )
    encoder = {"lora_base_model": "text_encoder", "lora_target_modules": "layer"}
    assert "training steps use dit" in refusal(
        here, quant_options="dit:own", lora_rank=2, **encoder
    )


def test_what_is_kept_is_in_the_plan(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(here, dry_run=True, fp8_models="dit"))
    assert "\nhow weights are kept\n    dit  fp8\n" in capsys.readouterr().out
