"""Flags name components, or files as the model flags have them; what they cannot mean is
refused before anything is loaded.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError, run
from dstrain.runs.resolve import resolve
from dstrain.runs.setup import Setup
from dstrain_memory.quantization.keeper import Quantize
from dstrain_memory.quantization.known_methods import METHODS, METHODS_GROUP
from dstrain_memory.quantization.stored_layers import StoredComponent, StoredLayers

from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.family import IDS, weights_of
from tests.support.runs import config

pytestmark = pytest.mark.usefixtures("tiny")
FP8 = METHODS["fp8"]


Stored = dict[str, StoredComponent]


def quantized(setup: Setup) -> Stored:
    found = [one for one in setup.keepers.all if isinstance(one, Quantize)]
    return dict(found[0].stored) if found else {}


def kept(here: Path, **flags: Any) -> Stored:
    return quantized(resolve(config(here, **flags)))


def fp8(*names: str) -> Stored:
    return dict.fromkeys(names, StoredComponent((StoredLayers(FP8),)))


def test_components_are_named(here: Path) -> None:
    assert kept(here) == {}
    assert kept(here, fp8_models="dit, text_encoder") == fp8("dit", "text_encoder")
    options = "dit:fp8/to_q;dit:int8_block@to_q;text_encoder:fp8"
    others = StoredLayers(METHODS["int8_block"], ("to_q",))
    assert kept(here, quant_options=options) == {
        "dit": StoredComponent((StoredLayers(FP8, (), ("to_q",)), others)),
        **fp8("text_encoder"),
    }
    both = kept(here, fp8_models="dit", quant_options="dit:fp8")
    assert both == fp8("dit")
    run(config(here, fp8_models="dit,vae", dry_run=True))


def test_files_are_named_as_the_model_flags_have_them(
    here: Path, tmp_path: Path
) -> None:
    """Each of several files of a component names it; one in no folder, its content."""
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
    flags: dict[str, Any] = {"model_paths": None, "dry_run": True}
    listed = {**flags, "model_id_with_origin_paths": IDS}
    assert kept(here, quant_options=f"{entry}:fp8", **listed) == fp8("dit")
    assert kept(here, fp8_models=entry, model_id="Tiny/Tiny", **flags) == fp8("dit")
    pinned = entry.replace(":", "@v1:", 1)
    flags["model_id_with_origin_paths"] = IDS.replace(entry, pinned)
    assert kept(here, fp8_models=pinned, **flags) == fp8("dit")
    with pytest.raises(UsageError, match=f"--fp8_models: '{entry[:9]}.*{pinned[:9]}"):
        kept(here, fp8_models=entry, **flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("fp8_models=ditt", "--fp8_models: 'ditt'.*'dit'"),
        ("fp8_models=tokenizer", "--fp8_models: .*tokenizer"),
        ("fp8_models=vae", "--fp8_models: vae"),
        ("quant_options=dit:nf4", "--quant_options: .*'bitsandbytes_nf4'"),
        ("quant_options=dit:torchao_int8_w8a8", "--quant_options: .*int8_w8a8"),
        (
            "fp8_models=dit trainable_models=dit",
            "--fp8_models: .*--trainable_models dit.*--lora_base_model dit",
        ),
        (
            "fp8_models=dit quant_options=vae:fp8 trainable_models=dit",
            "--fp8_models: .*--trainable_models dit",
        ),
        (
            "quant_options=dit:fp8@to_q trainable_models=dit.blocks.0",
            r"--quant_options: .*--trainable_models dit\.blocks\.0",
        ),
        ("quant_options=dit:fp8@to_qq", "--quant_options: .*'to_qq'.*'to_q'"),
        ("quant_options=dit:fp8@q", "--quant_options: dit:fp8@q: .*'q'"),
        ("quant_options=dit:fp8/to_qq", "--quant_options: .*'to_qq'.*'to_q'"),
        (
            "quant_options=dit:fp8;dit:int8_block@to_q",
            r"--quant_options: .*dit:fp8 .*dit:int8_block@to_q .*blocks\.0",
        ),
        ("quant_options=vae:fp8", "--quant_options: vae:fp8"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_what_flags_cannot_mean_is_refused_by_name(
    flags: str, said: str, dry_run: bool, here: Path
) -> None:
    given: dict[str, Any] = dict(one.split("=") for one in flags.split())
    with pytest.raises(UsageError, match=f"(?s){said}"):
        run(config(here, dry_run=dry_run, **given))
    assert not list(here.glob("out/*.safetensors"))


def test_what_a_run_records_names_components(here: Path) -> None:
    (encoder,) = weights_of(here / "model")["text_encoder"]
    options = "dit:fp8/to_q;dit:int8_block@to_q"
    setup = resolve(config(here, fp8_models=str(encoder), quant_options=options))
    recorded = {"fp8_models": "text_encoder", "quant_options": options}
    assert setup.recorded.plugin_options == recorded
    assert quantized(resolve(setup.recorded)) == quantized(setup)
    assert setup.config.plugin_options["fp8_models"] == str(encoder)


def test_a_component_that_no_stage_loads_is_refused(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that trains one expert does not load the other."""
    let_tiny_have_experts(monkeypatch)
    files = weights_of(here / "model")
    files["dit2"] = copied_denoiser(here / "model", tmp_path / "transformer_2")
    trained: dict[str, Any] = {"model_paths": json.dumps(list(files.values()))}
    trained |= {"lora_base_model": "dit2", "lora_target_modules": "to_q"}
    with pytest.raises(UsageError, match=r"(?s)--fp8_models: .*dit .*dit2"):
        kept(here, fp8_models="dit", **trained)
    assert kept(here, fp8_models="text_encoder", **trained) == fp8("text_encoder")
    # Of experts of which one alone is given, the denoiser's name means that one.
    del files["dit"]
    trained["model_paths"] = json.dumps(list(files.values()))
    assert kept(here, fp8_models="dit", **trained) == fp8("dit2")


OTHERS = """
from dstrain_memory.quantization.known_methods import FP8
from dstrain_memory.quantization.method import QuantizationMethod
# Of a name that is only refused otherwise.
PACKED = QuantizationMethod("comfy_kitchen_fp8_w8a8", FP8.store, FP8.stored_bytes)
BLOCKED = QuantizationMethod("blocked", FP8.store, FP8.stored_bytes, False)
"""


def test_methods_are_added_and_refused_where_they_give_no_gradient(
    here: Path, fake_plugin: Callable[..., Path]
) -> None:
    entries = {"packed": "other_methods:PACKED", "blocked": "other_methods:BLOCKED"}
    fake_plugin("extra-methods", entries, {"other_methods": OTHERS}, METHODS_GROUP)
    name = "comfy_kitchen_fp8_w8a8"
    assert [*kept(here, quant_options=f"dit:{name}")] == ["dit"]
    assert [*kept(here, quant_options="text_encoder:blocked")] == ["text_encoder"]
    encoder = {"lora_base_model": "text_encoder", "lora_target_modules": "layer"}
    for flags in ({}, encoder):
        with pytest.raises(UsageError, match=r"--quant_options: blocked .*dit"):
            kept(here, quant_options="dit:blocked", **flags)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (
            "dstrain_memory.quantization.known_methods:FP8",
            "'fp8' is one of plugin-memory's",
        ),
        ("dstrain_memory.quantization.known_methods:METHODS", "no QuantizationMethod"),
        ("dstrain_memory.nothing:FP8", "cannot be imported"),
    ],
)
def test_a_method_that_cannot_be_used_is_named(
    here: Path, fake_plugin: Callable[..., Path], entry: str, why: str
) -> None:
    fake_plugin("extra-method", {"own": entry}, {}, METHODS_GROUP)
    with pytest.raises(UsageError, match="quantization method own: .*" + why):
        kept(here, quant_options="dit:fp8")
