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
from dstrain.models import METHODS
from dstrain.models.execution import Kept, StoredLayers
from dstrain.pipeline import storage_options
from dstrain.runs.resolve import resolve

from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.family import IDS, weights_of
from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")
FP8 = METHODS["fp8"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def kept(here: Path, **flags: Any) -> dict[str, Kept]:
    return dict(resolve(config(here, **flags)).kept)


def fp8(*names: str) -> dict[str, Kept]:
    return dict.fromkeys(names, Kept((StoredLayers(FP8),)))


def test_components_are_named(here: Path) -> None:
    assert kept(here) == {}
    assert kept(here, fp8_models="dit, text_encoder") == fp8("dit", "text_encoder")
    options = "dit:fp8/to_q;dit:int8_block@to_q;text_encoder:fp8"
    others = StoredLayers(METHODS["int8_block"], ("to_q",))
    assert kept(here, quant_options=options) == {
        "dit": Kept((StoredLayers(FP8, (), ("to_q",)), others)),
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
    assert storage_options(setup.kept) == recorded
    assert dict(resolve(setup.recorded).kept) == dict(setup.kept)
    assert setup.config.fp8_models == str(encoder)


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


METHOD = """
from dstrain.models import METHODS
from dstrain.plugin import QuantizationMethod, hookimpl
api = 2

fp8 = METHODS["fp8"]

@hookimpl
def dstrain_quantizers():
    own = QuantizationMethod("comfy_kitchen_fp8_w8a8", fp8.store, fp8.stored_bytes)
    blocked = QuantizationMethod("blocked", fp8.store, fp8.stored_bytes, False)
    return [own, blocked]
"""


def test_a_method_of_a_plugin_is_used_and_refused_where_it_gives_no_gradient(
    here: Path, fake_plugin: Callable[..., Path]
) -> None:
    entries = {"own": "own_methods"}
    fake_plugin("plugin-own", entries, {"own_methods": METHOD}, group="dstrain")
    # Of a name that dstrain itself only refuses.
    assert [*kept(here, quant_options="dit:comfy_kitchen_fp8_w8a8")] == ["dit"]
    assert [*kept(here, quant_options="text_encoder:blocked")] == ["text_encoder"]
    encoder = {"lora_base_model": "text_encoder", "lora_target_modules": "layer"}
    for flags in ({}, encoder):
        with pytest.raises(UsageError, match=r"--quant_options: blocked .*dit"):
            kept(here, quant_options="dit:blocked", **flags)
