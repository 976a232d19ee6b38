"""The variant follows from what is given, in a fixed order; several left are named."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from dstrain import ModelConfig, Pipeline, StateError, TrainConfig, UsageError, run
from dstrain.pipeline import choose_variant, score_columns, with_overrides
from dstrain.plugin import (
    Component,
    Constant,
    ModelFamily,
    Option,
    PipelineSpec,
    at_least,
)
from dstrain.runs.resolve import resolve

from tests.support import family
from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.family import (
    MODEL,
    PIPELINES,
    Prompt,
    build,
    encode_image,
    weights_of,
    write,
)
from tests.support.runs import config, configs, project

SILENT = replace(MODEL, name="silent", pipelines=f"{__name__}:SILENT_PIPELINES")
"""A family whose variants say nothing of their denoisers."""
SILENT_PIPELINES = MappingProxyType(
    {name: replace(spec, denoiser_config={}) for name, spec in PIPELINES.items()}
)


def encode_mood(prompt: str, mood: str, *, text_encoder: Any) -> Prompt:
    """Read a mood as well, without which there is nothing."""
    raise NotImplementedError


MOODY = replace(
    MODEL, name="moody", pipelines=f"{__name__}:MOODY_PIPELINES", model_ids={}
)
"""A family whose first variant needs more than a prompt."""
NEEDS_MOOD = replace(SILENT_PIPELINES["other"], units=(encode_mood, encode_image))
HAS_MOOD = {**NEEDS_MOOD.defaults, "mood": "calm"}
MOODY_PIPELINES = MappingProxyType(
    {"base": NEEDS_MOOD, "other": replace(NEEDS_MOOD, defaults=HAS_MOOD)}
)
EQUAL = replace(SILENT, pipelines=f"{__name__}:EQUAL_PIPELINES")
EQUAL_PIPELINES = MappingProxyType(dict.fromkeys(PIPELINES, build("base")))
BY_ID = replace(MODEL, model_ids={"base": ("Tiny/Base",), "other": ("Tiny/Other",)})
SHARED = replace(SILENT, model_ids=dict.fromkeys(MODEL.variants, ("Tiny/Tiny",)))
ADAPTED = replace(
    MODEL,
    model_ids={"base": ("Tiny/Tiny",), "other": ("Tiny/Adapter",)},
    model_files={
        "Tiny/Adapter": {
            "vae": "vae.safetensors",
            "dit": "Tiny/Tiny:transformer/*.safetensors",
        }
    },
)
KNOWN = replace(
    MODEL,
    name="known",
    other_models={"Giant": {"depth": 9}, "Wide": {"width": 9}, "Flat": {"flat": True}},
    options=(*MODEL.options, Option("zero", "Zero.", "dit", "zero")),
)
"""A family that knows denoisers that no variant is for."""
COLUMNS = MappingProxyType(
    {
        "base": ("image", "prompt"),
        "other": ("image", "prompt", "mood"),
        "neither": ("image",),
    }
)
DENOISER = "transformer/*.safetensors"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def chosen(of: ModelFamily, *files: str, columns: str = "", **more: Any) -> str:
    """The variant by files, each of a model id, and by columns made for a variant."""
    models = [ModelConfig(None, *one.split(":")) for one in files]
    score = score_columns(COLUMNS[columns], ()) if columns else None
    return choose_variant(of, more.pop("name", None), models, score, **more)


def test_the_name_given_wins_over_everything() -> None:
    assert chosen(MODEL, "Tiny/Other-1:x", columns="other", name="base") == "base"
    with pytest.raises(UsageError, match=r"'othr'.*'other'"):
        chosen(MODEL, name="othr")


@pytest.mark.parametrize(
    ("of", "files", "columns", "variant"),
    [
        # The denoiser's id counts before all; those of encoders, which variants share,
        # come last.
        (MODEL, [f"Tiny/Other-1:{DENOISER}"], "base", "other"),
        (MODEL, ["Tiny/Other-1:single-file.safetensors"], "base", "other"),
        (MODEL, [f"Unknown/Id:{DENOISER}", "Tiny/Other-1:vae/a.pth"], "base", "base"),
        (SILENT, ["Tiny/Other-1:vae/a.pth"], "base", "base"),
        # An adapter tells more than the denoiser that it is for.
        (
            ADAPTED,
            [f"Tiny/Tiny:{DENOISER}", "Tiny/Adapter:vae.safetensors"],
            "base",
            "other",
        ),
        (ADAPTED, [f"Tiny/Tiny:{DENOISER}"], "base", "base"),
        # An id of several means the first unless columns tell.
        (SHARED, [f"Tiny/Tiny:{DENOISER}"], "", "base"),
        (SHARED, [f"Tiny/Tiny:{DENOISER}"], "neither", "base"),
        (SHARED, [f"Tiny/Tiny:{DENOISER}"], "base", "base"),
        (SHARED, [f"Tiny/Tiny:{DENOISER}"], "other", "other"),
        # Files in a folder of the denoiser count before those in none: these may be
        # the denoiser's, or a VAE's that several variants share.
        (BY_ID, ["Tiny/Base:vae.pth", f"Tiny/Other:{DENOISER}"], "", "other"),
        (BY_ID, [f"Tiny/Other:{DENOISER}", "Tiny/Base:vae.pth"], "", "other"),
        (BY_ID, ["Tiny/Base:vae.pth", "Tiny/Other:dit.pth"], "other", "other"),
        # Columns tell the one that uses most of them and lacks least.
        (MODEL, [], "base", "base"),
        (MODEL, [], "other", "other"),
    ],
)
def test_the_variant_follows_from_ids_then_columns(
    of: ModelFamily, files: list[str], columns: str, variant: str
) -> None:
    assert chosen(of, *files, columns=columns) == variant


def test_several_that_are_left_are_named_unless_either_or_only_one_will_do() -> None:
    elsewhere = "Else/Where:elsewhere.safetensors"
    for of, files, columns in (
        (SILENT, [elsewhere], ""),
        (BY_ID, ["Tiny/Base:vae.pth", "Tiny/Other:dit.pth"], ""),
        (EQUAL, [], "base"),
    ):
        with pytest.raises(UsageError, match=r"--variant: .*base, other"):
            chosen(of, *files, columns=columns)
    assert chosen(SILENT, elsewhere, take_first=True) == "base"
    shared = replace(SHARED, pipelines=EQUAL.pipelines)
    assert chosen(shared, f"Tiny/Tiny:{DENOISER}", columns="base") == "base"
    for variant in EQUAL.variants:

        def fits(spec: PipelineSpec, wanted: str = variant) -> tuple[int, int] | None:
            return (1, 0) if spec.variant == wanted else None

        assert chosen(EQUAL, columns="base", fits=fits) == variant


def test_of_several_that_are_left_a_prompt_alone_leaves_those_that_need_no_more(
    here: Path, fake_plugin: Callable[..., Path]
) -> None:
    records = {"moody": f"{__name__}:MOODY", "silent": f"{__name__}:SILENT"}
    fake_plugin("plugin-own", records, {})
    files = configs(here / "model")
    assert Pipeline.from_pretrained("moody", files).spec.variant == "other"
    with pytest.raises(UsageError, match="base, other"):
        Pipeline.from_pretrained("silent", files)


@pytest.mark.parametrize(
    ("variant", "wanted", "entries", "said"),
    [
        ("base", {"depth": 2, "dropout": 0.5}, {"dropout": None}, ""),
        ("base", {"zero": True}, {}, ""),  # a flag can say it
        ("base", None, {"depth": 1}, "depth 1.*base .*2\n.*--variant other"),
        ("other", None, {"depth": 7}, "depth 7.*other .*1"),
        ("base", None, {"depth": 9}, "Giant.*depth 9.*base .*2"),
        ("base", None, {"width": 9}, "Wide"),
        ("base", {"image": False}, {"image": 1280}, "image 1280; .*base .*none"),
        ("base", {"image": False}, {"image": True}, "image True; .*base .*none"),
        ("base", {"image": True}, {"image": None}, "image None; .*base .*True"),
        ("base", {"image": True}, {}, "image None; .*base .*True"),
        ("base", {"in_channels": 64}, {"in_channels": 384}, "384; .*base .*64"),
    ],
)
def test_a_denoiser_of_another_model_is_named(
    variant: str,
    wanted: dict[str, Any] | None,
    entries: dict[str, Any],
    said: str,
    tmp_path: Path,
    fake_plugin: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_plugin("plugin-known", {"known": f"{__name__}:KNOWN"}, {})
    if wanted is not None:
        spec = replace(family.BASE, denoiser_config=wanted)
        monkeypatch.setitem(family.PIPELINES, "base", spec)
    monkeypatch.setitem(family.PIPELINES, "written", family.BASE)
    write(tmp_path / "model", "written")
    path = tmp_path / "model/transformer/config.json"
    content = {**json.loads(path.read_text()), **entries}
    kept = {name: one for name, one in content.items() if name != "dropout" or one}
    path.write_text(json.dumps(kept))
    files = configs(tmp_path / "model")
    if not said:
        Pipeline.from_pretrained("known", files, variant)
        return
    with pytest.raises(StateError, match=f"{path.parent}.*{said}"):
        Pipeline.from_pretrained("known", files, variant)


def test_the_denoisers_configuration_decides_where_nothing_else_does(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = copied_denoiser(here / "model", tmp_path / "transformer")
    assert choose_variant(MODEL, None, [ModelConfig(shards)]) == "base"
    path = tmp_path / "transformer/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "depth": 1}))
    assert choose_variant(MODEL, None, [ModelConfig(shards)]) == "other"
    score = score_columns(COLUMNS["base"], ())
    files = [ModelConfig(shards)]
    assert choose_variant(MODEL, None, files, score) == "base"
    # Columns leave two, neither of which has it.
    monkeypatch.setitem(family.PIPELINES, "twin", family.BASE)
    three = replace(MODEL, name="three", variants=(*MODEL.variants, "twin"))
    assert choose_variant(three, None, files, score) == "other"


def test_files_in_the_place_of_a_component_are_of_a_variant_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = family.COMPONENTS[0].network
    adapter = Component("adapter", network=network, folder="adapter")
    monkeypatch.setattr(family, "COMPONENTS", (*family.COMPONENTS, adapter))
    components = (*family.BASE.components, "adapter")
    adapted = replace(family.BASE, components=components)
    monkeypatch.setitem(family.PIPELINES, "other", adapted)
    shared = replace(SHARED, pipelines=MODEL.pipelines)
    model = f"Tiny/Tiny:{DENOISER}"
    assert chosen(shared, model) == "base"
    places = ("Tiny/Adapter:adapter/model.safetensors", "Tiny/Tiny:elsewhere.pth")
    assert chosen(shared, model, *places) == "other"


@pytest.mark.usefixtures("tiny")
def test_the_id_and_configuration_of_a_second_expert_are_those_of_a_denoiser(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_tiny_have_experts(monkeypatch)
    second = "Tiny/Other:transformer_2/*.safetensors"
    assert chosen(BY_ID, "Tiny/Base:vae.pth", second) == "other"
    shards = copied_denoiser(here / "model", tmp_path / "transformer_2")
    (tmp_path / "transformer_2/config.json").write_text('{"width": 8, "depth": 7}')
    files = [*configs(here / "model"), ModelConfig(shards)]
    with pytest.raises(StateError, match=r"transformer_2.*depth 7"):
        Pipeline.from_pretrained("tiny", files, "base")
    alone = [shards, *list(weights_of(here / "model").values())[1:]]
    with pytest.raises(StateError, match=r"transformer_2.*depth 7"):
        run(config(here, model_paths=json.dumps(alone), variant="base", dry_run=True))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"extra_inputs": "imgae"}, r"--extra_inputs: .*metadata\.json.*'imgae'"),
        ({"num_frames": 5}, "--num_frames: .*base"),
        ({"frame_sampling": "chunk"}, "--frame_sampling: .*base"),
    ],
)
def test_flags_for_what_the_variant_does_not_read_are_refused(
    flags: dict[str, Any], said: str, here: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        run(config(here, toy=True, output_path=tmp_path, **flags))


@pytest.mark.usefixtures("tiny")
def test_stage_2_takes_the_variant_of_its_cache(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "data", tmp_path / "data")
    table = tmp_path / "data/metadata.json"
    rows = [{**row, "mood": "calm"} for row in json.loads(table.read_text())]
    table.write_text(json.dumps(rows))
    common: dict[str, Any] = {"toy": True, "feature_cache": tmp_path / "cache"}
    run(config(tmp_path, task="sft:data_process", **common))
    second = config(tmp_path, task="sft:train", dataset_base_path=None, **common)
    assert resolve(second).spec.variant == "other"


def having(constant: Constant) -> PipelineSpec:
    spec = build("base")
    return replace(spec, inputs={**spec.inputs, "area": constant})


@pytest.mark.parametrize(
    ("options", "toy", "value"),
    [
        ({}, False, 1024),
        ({}, True, 32),
        ({"area": "64"}, True, 64),
        ({"area": "64"}, False, 64),
    ],
)
def test_a_setting_is_the_flags_else_the_toys_else_the_variants(
    options: Mapping[str, str], toy: bool, value: int
) -> None:
    constant = Constant(1024, toy=32, check=at_least(1))
    given = TrainConfig(model="tiny", toy=toy, family_options=options)
    found = with_overrides(having(constant), MODEL, given)
    assert found.constants["area"] == replace(constant, value=value)


@pytest.mark.parametrize(
    ("steps", "toy", "taken"), [(50, True, 4), (2, True, 2), (50, False, 50)]
)
def test_a_toy_takes_few_steps_by_default(steps: int, toy: bool, taken: int) -> None:
    spec = replace(build("base"), defaults={"num_inference_steps": steps})
    found = with_overrides(spec, MODEL, TrainConfig(model="tiny", toy=toy))
    assert found.defaults == {"num_inference_steps": taken}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("big", "'big'"),
        ("1.5", r"'1\.5'"),
        ("1_000", "'1_000'"),
        ("0", "1 .*got 0"),
        ("-1", "1 .*got -1"),
        (" ", "blank"),
    ],
)
def test_text_that_is_no_such_setting_is_refused(text: str, said: str) -> None:
    given = TrainConfig(model="tiny", family_options={"area": text})
    spec = having(Constant(1024, check=at_least(1)))
    with pytest.raises(UsageError, match=f"--area: .*{said}"):
        with_overrides(spec, MODEL, given)


def test_a_flag_is_refused_where_it_does_not_act() -> None:
    deep = Option("deep", "Depth.", "dit", "deep", ("other",))
    options = (*MODEL.options, deep, Option("area", "Area."))
    known = replace(MODEL, options=options)
    for name, text, acting in (
        ("deep", "True", build("other")),
        ("area", "64", having(Constant(1024))),
    ):
        flags = {name: text, "tokenizer_path": "x"}
        given = TrainConfig(model="tiny", family_options=flags)
        assert with_overrides(acting, known, given).variant == acting.variant
        with pytest.raises(UsageError, match=f"--{name}: .*base"):
            with_overrides(build("base"), known, given)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("experts", "asked", "trained"),
    [
        (("dit2",), "dit", "dit2"),
        (("dit2",), "dit.blocks.1", "dit2.blocks.1"),
        (("dit",), "dit", "dit"),
        (("dit", "dit2"), "dit", "dit"),
        (("dit2",), "vae", "vae"),
    ],
)
def test_the_experts_role_is_played_by_the_part_whose_files_are_given(
    experts: tuple[str, ...],
    asked: str,
    trained: str,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_tiny_have_experts(monkeypatch)
    files = weights_of(here / "model")
    files["dit2"] = copied_denoiser(here / "model", tmp_path / "transformer_2")
    names = (*experts, "text_encoder", "vae")
    given = json.dumps([files[name] for name in names])
    setup = resolve(config(here, trainable_models=asked, model_paths=given))
    assert setup.trainables.full == (trained,)
