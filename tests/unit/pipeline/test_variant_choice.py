"""The variant follows from what is given, in a fixed order; several left are named;
constants follow flags and --toy.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from dstrain import (
    SFT,
    ModelConfig,
    StateError,
    Trainables,
    TrainConfig,
    UsageError,
    run,
)
from dstrain.graph import make_plan
from dstrain.models import Found
from dstrain.pipeline import choose_variant, score_columns, with_overrides
from dstrain.pipeline.variant_choice import (
    check_denoiser,
    runs_on_a_prompt,
    score_inputs,
)
from dstrain.plugin import (
    Column,
    Component,
    Constant,
    ExpertSchedule,
    Option,
    PipelineSpec,
    at_least,
)
from dstrain.runs.resolve import resolve, resolve_experts

from tests.support.family import (
    MODEL,
    PIPELINES,
    Prompt,
    build,
    encode_image,
    weights_of,
)
from tests.support.runs import project

SILENT = replace(MODEL, pipelines=f"{__name__}:SILENT_PIPELINES")
"""A family whose variants say nothing of their denoisers."""
SILENT_PIPELINES = MappingProxyType(
    {name: replace(spec, denoiser_config={}) for name, spec in PIPELINES.items()}
)


def encode_mood(prompt: str, mood: str, *, text_encoder: Any) -> Prompt:
    """Read a mood as well, without which there is nothing."""
    raise NotImplementedError


MOODY = replace(SILENT_PIPELINES["other"], units=(encode_mood, encode_image))
MOODY_PIPELINES = MappingProxyType({"base": MOODY, "other": SILENT_PIPELINES["base"]})
EQUAL_PIPELINES = MappingProxyType(dict.fromkeys(PIPELINES, build("base")))
COLUMNS = MappingProxyType(
    {"base": ("image", "prompt"), "other": ("image", "prompt", "mood")}
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def test_the_name_given_wins_over_everything() -> None:
    models = (ModelConfig(model_id="Tiny/Other-1", origin_file_pattern="x"),)
    score = score_columns(("image",), ())
    assert choose_variant(MODEL, "base", models, score) == "base"
    with pytest.raises(UsageError, match=r"no variant 'othr'.*did you mean 'other'"):
        choose_variant(MODEL, "othr", models, score)


@pytest.mark.parametrize(
    ("models", "variant"),
    [
        ((("Tiny/Other-1", "transformer/*.safetensors"),), "other"),
        ((("Tiny/Other-1", "single-file.safetensors"),), "other"),
        # The denoiser's id counts before all; those of encoders, which variants share,
        # come last.
        (
            (
                ("Unknown/Id", "transformer/*.safetensors"),
                ("Tiny/Other-1", "vae/*.safetensors"),
            ),
            "base",
        ),
    ],
)
def test_the_denoisers_model_id_tells_the_variant(
    models: tuple[tuple[str, str], ...], variant: str
) -> None:
    configs = tuple(ModelConfig(None, *pair) for pair in models)
    assert (
        choose_variant(MODEL, None, configs, score_columns(COLUMNS["base"], ()))
        == variant
    )


def test_the_id_of_an_adapter_tells_more_than_that_of_the_denoiser_it_is_for() -> None:
    files = {"vae": "vae.safetensors", "dit": "Tiny/Tiny:transformer/*.safetensors"}
    family = replace(
        MODEL,
        model_ids={"base": ("Tiny/Tiny",), "other": ("Tiny/Adapter",)},
        model_files={"Tiny/Adapter": files},
    )
    denoiser = ModelConfig(None, "Tiny/Tiny", "transformer/*.safetensors")
    adapter = ModelConfig(None, "Tiny/Adapter", "vae.safetensors")
    score = score_columns(COLUMNS["base"], ())
    assert choose_variant(family, None, (denoiser, adapter), score) == "other"
    assert choose_variant(family, None, (denoiser,), score) == "base"


def test_an_id_of_several_variants_means_the_first_unless_columns_tell() -> None:
    ids = {"base": ("Tiny/Tiny",), "other": ("Tiny/Tiny",)}
    family = replace(SILENT, model_ids=ids)
    models = (ModelConfig(None, "Tiny/Tiny", "transformer/*.safetensors"),)
    assert choose_variant(family, None, models) == "base"
    score = score_columns(COLUMNS["other"], ())
    assert choose_variant(family, None, models, score) == "other"
    with pytest.raises(UsageError, match="could be base, other"):
        choose_variant(SILENT, None, (ModelConfig("elsewhere.safetensors"),))


def test_of_several_that_are_left_a_prompt_alone_leaves_those_that_need_no_more() -> (
    None
):
    family = replace(MODEL, pipelines=f"{__name__}:MOODY_PIPELINES", model_ids={})
    models = (ModelConfig("elsewhere.safetensors"),)
    assert choose_variant(family, None, models, fits=runs_on_a_prompt) == "other"
    with pytest.raises(UsageError, match="could be base, other"):
        choose_variant(SILENT, None, models, fits=runs_on_a_prompt)


@pytest.mark.parametrize("variant", ["base", "other"])
def test_columns_tell_the_variant_that_uses_most_of_them_and_lacks_least(
    variant: str,
) -> None:
    assert (
        choose_variant(MODEL, None, (), score_columns(COLUMNS[variant], ())) == variant
    )


def test_an_extra_input_is_known_to_the_variant() -> None:
    fits = score_columns(COLUMNS["other"], ("mood",))
    assert fits(build("base")) is None
    assert fits(build("other")) == (3, 0)


def test_a_variant_that_lacks_what_its_denoiser_needs_does_not_fit() -> None:
    assert score_columns(("image",), ())(build("base")) is None
    assert score_inputs(("mood",))(build("other")) is None
    assert score_inputs(("prompt", "mood"))(build("other")) == (2, 0)


@pytest.mark.parametrize(
    ("config", "variant", "said"),
    [
        ({"depth": 2, "width": 8}, "base", ""),
        ({"width": 8}, "base", ""),  # the network's default
        (
            {"depth": 1},
            "base",
            "has depth 1; variant base takes 2; give --variant other",
        ),
        ({"depth": 7}, "other", "has depth 7; variant other takes 1"),
        (
            {"depth": 9},
            "base",
            "is Giant, which no variant of tiny is for: it has depth 9; variant base takes 2",
        ),
        ({"depth": 2, "width": 9}, "base", "is Wide, which no variant of tiny is for"),
    ],
)
def test_a_denoiser_of_another_model_is_named(
    config: dict[str, Any], variant: str, said: str
) -> None:
    known = {"Giant": {"depth": 9}, "Wide": {"width": 9}, "Flat": {"flat": True}}
    model = replace(MODEL, other_models=known)
    found = Found({}, {"dit": config})
    if not said:
        check_denoiser(model, build(variant), found)
        return
    with pytest.raises(StateError) as caught:
        check_denoiser(model, build(variant), found)
    error = caught.value
    assert (error.where, "; ".join([error.what, *error.help_lines])) == ("dit", said)


@pytest.mark.parametrize(
    ("wanted", "config", "said"),
    [
        ({"image": False}, {"image": 1280}, "has image 1280; variant base takes none"),
        ({"image": False}, {"image": True}, "has image; variant base takes none"),
        ({"image": True}, {"image": None}, "has no image; variant base takes one"),
        ({"image": True}, {}, "has no image; variant base takes one"),
        (
            {"in_channels": 64},
            {"in_channels": 384},
            "has 384 input channels; variant base takes 64",
        ),
    ],
)
def test_an_entry_is_present_absent_or_equal(
    wanted: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    spec = replace(build("base"), denoiser_config=wanted)
    with pytest.raises(StateError) as caught:
        check_denoiser(MODEL, spec, Found({}, {"dit": config}))
    assert caught.value.what == said


def test_what_a_flag_can_say_is_not_refused() -> None:
    spec = replace(build("base"), denoiser_config={"zero": True})
    model = replace(MODEL, options=(Option("zero", "Zero.", "dit", "zero"),))
    check_denoiser(model, spec, Found({}, {"dit": {}}))


def test_the_denoisers_configuration_decides_where_nothing_else_does(
    here: Path, tmp_path: Path
) -> None:
    shards = ModelConfig(path=weights_of(here / "model")["dit"])
    assert choose_variant(MODEL, None, (shards,)) == "base"
    shallow = tmp_path / "transformer"
    shallow.mkdir()
    for path in shards.path or ():
        (shallow / Path(path).name).symlink_to(path)
    content = json.loads(
        (Path(weights_of(here / "model")["dit"][0]).parent / "config.json").read_text()
    )
    (shallow / "config.json").write_text(json.dumps({**content, "depth": 1}))
    assert (
        choose_variant(
            MODEL,
            None,
            (ModelConfig(path=[str(p) for p in shallow.glob("*.s*")]),),
        )
        == "other"
    )


def test_files_in_a_folder_of_the_denoiser_count_before_those_in_none() -> None:
    """One of an original repository has no folder: it may be the denoiser's, or a VAE
    that several variants share.
    """
    by_id = replace(
        MODEL,
        model_ids={"base": ("Tiny/Base",), "other": ("Tiny/Other",)},
    )
    shared = ModelConfig(None, "Tiny/Base", "vae.pth")
    for own in ("transformer/*.safetensors", "denoiser.safetensors"):
        files = [shared, ModelConfig(None, "Tiny/Other", own)]
        for models in (files, files[::-1]):
            if own.startswith("transformer"):
                assert choose_variant(by_id, None, models) == "other"
                continue
            with pytest.raises(UsageError, match="--variant: could be base, other"):
                choose_variant(by_id, None, models)
            assert (
                choose_variant(by_id, None, models, score_columns(COLUMNS["other"], ()))
                == "other"
            )


def test_of_the_variants_that_one_id_means_the_columns_tell_or_else_it_is_the_first() -> (
    None
):
    shared = replace(MODEL, model_ids=dict.fromkeys(MODEL.variants, ("Tiny/Base",)))
    models = (ModelConfig(None, "Tiny/Base", "transformer/*.safetensors"),)
    assert choose_variant(shared, None, models) == "base"
    fits_none = score_columns(("image",), ())
    assert choose_variant(shared, None, models, fits_none) == "base"
    for variant, columns in COLUMNS.items():
        score = score_columns(columns, ())
        assert choose_variant(shared, None, models, score) == variant


def test_of_variants_that_are_left_those_that_can_read_the_cells_are_chosen() -> None:
    score = score_columns(COLUMNS["base"], ())
    same = replace(SILENT, pipelines=f"{__name__}:EQUAL_PIPELINES")
    with pytest.raises(UsageError, match="--variant: could be base, other"):
        choose_variant(same, None, (), score)
    for variant in same.variants:
        fits = partial(lambda wanted, spec: spec.variant == wanted, variant)
        assert choose_variant(same, None, (), score, fits=fits) == variant


def test_files_in_the_place_of_a_component_are_of_a_variant_that_has_it() -> None:
    pipelines = {
        "base": build("base"),
        "other": replace(
            build("base"), components=(*build("base").components, "adapter")
        ),
    }
    adapter = Component(
        "adapter", network=MODEL.load("components")[0].network, folder="adapter"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.family.PIPELINES", pipelines)
        patch.setattr(
            "tests.support.family.COMPONENTS", (*MODEL.load("components"), adapter)
        )
        model = (ModelConfig(None, "Tiny/Base", "transformer/*.safetensors"),)
        added = ModelConfig(None, "Tiny/Adapter", "adapter/model.safetensors")
        shared = replace(MODEL, model_ids=dict.fromkeys(MODEL.variants, ("Tiny/Base",)))
        assert choose_variant(shared, None, model) == "base"
        assert choose_variant(shared, None, (*model, added)) == "other"


def test_a_column_whose_files_are_not_loaded_is_no_hint() -> None:
    spec = replace(
        build("base"),
        inputs={**build("base").inputs, "mask": Column("mask", "image")},
    )
    columns = ("image", "prompt", "mask")
    assert score_columns(columns, ())(spec) == (3, 0)
    assert score_columns(columns, (), ("image",))(spec) == (2, 0)


@pytest.mark.usefixtures("tiny")
def test_an_extra_input_that_no_variant_knows_is_named(
    here: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {
        "model": "tiny",
        "toy": True,
        "dataset_base_path": here / "data",
    }
    with pytest.raises(
        UsageError,
        match=r"--extra_inputs: no column of metadata\.json gives input 'imgae'",
    ):
        run(TrainConfig(extra_inputs="imgae", output_path=tmp_path, **flags))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("flags", [{"num_frames": 5}, {"frame_sampling": "chunk"}])
def test_flags_for_videos_are_refused_where_there_are_none(
    flags: dict[str, Any], here: Path
) -> None:
    with pytest.raises(UsageError, match="has no effect: variant base reads no videos"):
        resolve(
            TrainConfig(
                model="tiny", toy=True, dataset_base_path=here / "data", **flags
            )
        )


def test_an_encoders_id_decides_only_between_what_everything_else_leaves() -> None:
    encoder = (ModelConfig(None, "Tiny/Other-1", "vae/*.safetensors"),)
    assert choose_variant(SILENT, None, encoder) == "other"
    assert (
        choose_variant(SILENT, None, encoder, score_columns(COLUMNS["base"], ()))
        == "base"
    )


def test_several_that_are_left_are_named_unless_either_will_do(here: Path) -> None:
    shards = (ModelConfig(path=weights_of(here / "model")["dit"]),)
    with pytest.raises(UsageError, match="--variant: could be base, other; choose one"):
        choose_variant(SILENT, None, shards)
    assert choose_variant(SILENT, None, shards, take_first=True) == "base"


@pytest.mark.usefixtures("tiny")
def test_stage_2_takes_the_variant_of_its_cache(here: Path, tmp_path: Path) -> None:
    rows = json.loads((here / "data/metadata.json").read_text())
    data = tmp_path / "data"
    data.mkdir()
    for row in rows:
        shutil.copy(here / "data" / row["image"], data)
    (data / "metadata.json").write_text(
        json.dumps([{**row, "mood": "calm"} for row in rows])
    )
    common: dict[str, Any] = {
        "model": "tiny",
        "toy": True,
        "feature_cache": tmp_path / "cache",
    }
    run(TrainConfig(task="sft:data_process", dataset_base_path=data, **common))
    assert (
        resolve(
            TrainConfig(task="sft:train", output_path=tmp_path, **common)
        ).spec.variant
        == "other"
    )


def having(**constants: Constant) -> PipelineSpec:
    spec = build("base")
    return replace(spec, inputs={**spec.inputs, **constants})


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
    config = TrainConfig(model="tiny", toy=toy, family_options=options)
    assert (
        with_overrides(having(area=Constant(1024, toy=32)), MODEL, config)
        .constants["area"]
        .value
        == value
    )


@pytest.mark.parametrize(
    ("steps", "toy", "taken"), [(50, True, 4), (2, True, 2), (50, False, 50)]
)
def test_a_toy_takes_few_steps_by_default(steps: int, toy: bool, taken: int) -> None:
    spec = replace(having(), defaults={"num_inference_steps": steps})
    config = TrainConfig(model="tiny", toy=toy)
    assert with_overrides(spec, MODEL, config).defaults == {
        "num_inference_steps": taken
    }


def test_a_bare_flag_is_refused_where_it_does_not_act() -> None:
    family = replace(
        MODEL,
        options=(*MODEL.options, Option("deep", "Depth.", "dit", "deep", ("other",))),
    )
    config = TrainConfig(model="tiny", family_options={"deep": "True"})
    assert with_overrides(build("other"), family, config).variant == "other"
    with pytest.raises(
        UsageError, match="--deep: has no effect: variant base does not use it"
    ):
        with_overrides(build("base"), family, config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("big", "'big' is not an integer"),
        ("1.5", "'1.5' is not an integer"),
        ("1_000", "'1_000' is not an integer"),
        ("0", "expected 1 or more, got 0"),
        ("-1", "expected 1 or more, got -1"),
        (" ", "is blank"),
    ],
)
def test_text_that_is_no_such_setting_or_out_of_its_range_is_refused(
    text: str, said: str
) -> None:
    config = TrainConfig(model="tiny", family_options={"area": text})
    with pytest.raises(UsageError, match=f"--area: {said}"):
        with_overrides(having(area=Constant(1024, check=at_least(1))), MODEL, config)


def test_a_setting_keeps_its_check_when_it_is_changed() -> None:
    config = TrainConfig(model="tiny", toy=True)
    constant = Constant(1024, toy=32, check=at_least(1))
    assert with_overrides(having(area=constant), MODEL, config).constants[
        "area"
    ] == replace(constant, value=32)
    assert [Constant(value).kind for value in ("a", 1, 1.5)] == [
        "text",
        "integer",
        "number",
    ]


def test_the_flag_of_a_setting_that_the_variant_lacks_is_refused() -> None:
    family = replace(MODEL, options=(*MODEL.options, Option("area", "Area.")))
    config = TrainConfig(
        model="tiny", family_options={"area": "64", "tokenizer_path": "x"}
    )
    assert (
        with_overrides(having(area=Constant(1024)), family, config)
        .constants["area"]
        .value
        == 64
    )
    with pytest.raises(
        UsageError, match="--area: has no effect: variant base does not use it"
    ):
        with_overrides(build("base"), family, config)


@pytest.mark.parametrize(
    ("folders", "asked", "trained"),
    [
        (("low_noise",), "dit", "dit2"),
        (("low_noise",), "dit.blocks.1", "dit2.blocks.1"),
        (("transformer",), "dit", "dit"),
        (("transformer", "low_noise"), "dit", "dit"),
        (("low_noise",), "vae", "vae"),
    ],
)
def test_the_experts_role_is_played_by_the_part_whose_files_are_given(
    folders: tuple[str, ...], asked: str, trained: str
) -> None:
    places = {"dit": "transformer", "dit2": "low_noise"}
    parts = tuple(
        Component(name, SimpleNamespace(), folder) for name, folder in places.items()
    )
    family: Any = SimpleNamespace(load=lambda part: parts)
    spec: Any = SimpleNamespace(
        experts=ExpertSchedule("dit", {"dit": (875, 1000), "dit2": (0, 875)})
    )
    models = tuple(
        ModelConfig(None, "Some/Id", f"{folder}/*.safetensors") for folder in folders
    )
    assert resolve_experts(Trainables((asked,)), spec, family, models).full == (
        trained,
    )


def test_every_plan_has_the_constants() -> None:
    spec = having(area=Constant(1024))
    assert (
        "area"
        in make_plan(
            spec, frozenset({"prompt", "input_image", "height", "width"}), SFT
        ).inputs
    )
