"""Which of equal networks a file is, and whose configuration lies beside it."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import GenerateConfig, ModelConfig, Pipeline, StateError, UsageError, run
from dstrain.generation.batch import generate_dataset
from dstrain.models import assign, component_at, find
from dstrain.models.configs import ConfigQuery, find_config
from dstrain.models.hub import ModelSource
from dstrain.models.needed_components import denoiser_config
from dstrain.plugin import (
    CheckpointFormat,
    Component,
    DiffusersNetwork,
    Files,
    KeyMap,
    TransformersNetwork,
    same_config,
)
from safetensors.torch import load_file, save, save_file

from tests.support.family import COMPONENTS, MODEL, weights_of
from tests.support.runs import config, project_by_id, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return project_by_id(tmp_path, monkeypatch)


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "w.safetensors").write_bytes(save({"w": torch.zeros(1)}))
    files = Files((tmp_path / "w.safetensors",))
    with pytest.raises(StateError, match=r"config\.json: cannot be read"):
        find_config(
            ConfigQuery(Component("dit", SimpleNamespace(), "dit", ("w",)), files)
        )


def test_what_a_format_implies_is_not_overruled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"width": 8, "kind": "older"}')
    path = tmp_path / "w.safetensors"
    path.write_bytes(save({"w": torch.zeros(1), "mark": torch.zeros(0)}))
    marked = CheckpointFormat(
        ("mark",),
        ignored=("mark",),
        configuration=same_config,
        implies=(("kind", "newer"),),
    )
    component = Component("dit", SimpleNamespace(), "dit", ("w",), formats=(marked,))
    for files, kind in (
        (Files((path,), checkpoint_format=marked), "newer"),
        (Files((path,)), "older"),
    ):
        assert find_config(ConfigQuery(component, files)) == {"width": 8, "kind": kind}


def translated(
    content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Any] | None:
    """The configuration of the layout OLD: another name, and a number that only the
    weights tell.
    """
    if "dim" not in content:
        return None
    return {"width": content["dim"], "depth": len(shapes)}


OLD = CheckpointFormat(
    ("old.weight",), (KeyMap("new", "old"),), configuration=translated
)
FOREIGN = CheckpointFormat(("foreign.weight",), (KeyMap("new", "foreign"),))


def part(name: str, folder: str, *others: str, **fields: Any) -> Component:
    return Component(
        name,
        SimpleNamespace(),
        folder,
        other_folders=others,
        **{"key_patterns": ("new.weight",), "formats": (OLD, FOREIGN), **fields},
    )


DIT = part(
    "dit",
    "transformer",
    "high",
    prefixes=("net.",),
    infer=lambda shapes: {"inferred": shapes["new.weight"]},
)
EXPERT = part("dit2", "transformer_2", "low", prefixes=("net.",))


def weights(path: Path, *names: str, **header: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(2, 3) for name in names}, path, header or None)
    return str(path)


def assigned(*paths: str, wanted: tuple[str, ...] = ()) -> dict[str, str]:
    found = assign([ModelConfig(path=path) for path in paths], (DIT, EXPERT), wanted)
    return {name: "/".join(files.paths[0].parts[-2:]) for name, files in found.items()}


def test_experts_are_distinguished_by_their_folders_else_by_their_order(
    tmp_path: Path,
) -> None:
    low, high, first, second, third = (
        weights(tmp_path / f"{place}.safetensors", "new.weight")
        for place in ("low/a", "high/a", "x/a", "x/b", "x/c")
    )
    assert assigned(low, high) == {
        "dit": "high/a.safetensors",
        "dit2": "low/a.safetensors",
    }
    assert assigned(first, high) == {
        "dit": "high/a.safetensors",
        "dit2": "x/a.safetensors",
    }
    assert assigned(second, first) == {
        "dit": "x/b.safetensors",
        "dit2": "x/a.safetensors",
    }
    assert assigned(first, first) == assigned(first) == {"dit": "x/a.safetensors"}
    with pytest.raises(
        UsageError,
        match=r"two sets of files match dit: .*x/a.safetensors and .*x/c.safetensors",
    ):
        assigned(first, second, third)
    with pytest.raises(
        UsageError,
        match=r"two sets of files match dit2: .*low/a.safetensors and .*low/b.safetensors",
    ):
        assigned(low, weights(tmp_path / "low/b.safetensors", "new.weight"))


def test_the_header_of_a_trained_file_says_which_of_two_experts_it_is_wherever_it_is(
    tmp_path: Path,
) -> None:
    trained, elsewhere, other = (
        weights(tmp_path / f"{place}.safetensors", "new.weight", component=name)
        for place, name in (
            ("out/step-2", "dit2"),
            ("high/step-2", "dit2"),
            ("out/other", "vae"),
        )
    )
    flat, high = (
        weights(tmp_path / f"{place}.safetensors", "new.weight")
        for place in ("x/a", "high/a")
    )
    swapped = {"dit": "x/a.safetensors", "dit2": "out/step-2.safetensors"}
    assert assigned(trained, flat) == assigned(flat, trained) == swapped
    assert assigned(elsewhere, high) == {
        "dit": "high/a.safetensors",
        "dit2": "high/step-2.safetensors",
    }
    assert assigned(other, flat) == {
        "dit": "out/other.safetensors",
        "dit2": "x/a.safetensors",
    }
    with pytest.raises(
        UsageError, match=r"two sets of files match dit2: .*out/step-2.* and .*low/a"
    ):
        assigned(trained, weights(tmp_path / "low/a.safetensors", "new.weight"))


def test_files_that_nothing_tells_are_the_one_expert_that_is_wanted(
    tmp_path: Path,
) -> None:
    flat, second, high, low = (
        weights(tmp_path / f"{place}.safetensors", "new.weight")
        for place in ("x/a", "x/b", "high/a", "low/a")
    )
    assert (
        assigned(flat, wanted=("dit2",))
        == assigned(flat, flat, wanted=("dit2",))
        == {"dit2": "x/a.safetensors"}
    )
    assert (
        assigned(flat, wanted=("dit",))
        == assigned(flat, wanted=("dit", "dit2"))
        == {"dit": "x/a.safetensors"}
    )
    both = {"dit": "x/a.safetensors", "dit2": "x/b.safetensors"}
    assert assigned(flat, second, wanted=("dit2",)) == both
    assert assigned(flat, high, wanted=("dit",)) == {
        "dit": "high/a.safetensors",
        "dit2": "x/a.safetensors",
    }
    assert assigned(flat, low, wanted=("dit2",)) == {
        "dit": "x/a.safetensors",
        "dit2": "low/a.safetensors",
    }


@pytest.fixture
def experts(here: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A denoiser that may have two parts, in a family whose variants have only the
    first; two files for it.
    """
    expert = replace(COMPONENTS[0], name="dit2", folder="transformer_2")
    monkeypatch.setattr(
        "tests.support.family.COMPONENTS", (COMPONENTS[0], expert, *COMPONENTS[1:])
    )
    whole = {
        name: value
        for path in weights_of(here / "model")["dit"]
        for name, value in load_file(path).items()
    }
    paths = (here / "flat/one.safetensors", here / "flat/transformer_2/two.safetensors")
    for path in paths:
        path.parent.mkdir(parents=True)
        save_file(whole, path)
        (path.parent / "config.json").write_text(json.dumps({"width": 8, "depth": 2}))
    return str(paths[0]), str(paths[1])


def test_no_file_is_an_expert_that_the_variant_lacks(
    here: Path, experts: tuple[str, str]
) -> None:
    others = [
        paths for name, paths in weights_of(here / "model").items() if name != "dit"
    ]
    for one in experts:
        train(
            here,
            max_steps=1,
            output_path=here / Path(one).stem,
            model_paths=json.dumps([one, *others]),
        )
    both = {"model_paths": json.dumps([*experts, *others])}
    prompts = here / "prompts.json"
    prompts.write_text(json.dumps([{"prompt": "dog", "seed": 1}]))
    made = {"model": "tiny", "variant": "base", "output": here / "made", **both}
    opens: tuple[Callable[[], Any], ...] = (
        lambda: train(here, **both),
        lambda: run(
            config(here, task="sft:data_process", feature_cache=here / "cache", **both)
        ),
        lambda: Pipeline.from_pretrained(
            "tiny", [ModelConfig(path=path) for path in (*experts, *others)], "base"
        ),
        lambda: generate_dataset(GenerateConfig(**made), prompts),
    )
    for opening in opens:
        with pytest.raises(
            UsageError,
            match=r"two sets of files match dit: .*one\.safetensors and .*two\.safetensors",
        ):
            opening()
    assert [path.name for path in (here / "made").iterdir()] == [".dstrain.lock"], (
        "refused before anything is written or loaded"
    )


def test_the_files_of_one_part_alone_tell_the_denoisers_configuration(
    here: Path, experts: tuple[str, str]
) -> None:
    for path in experts:
        assert denoiser_config(MODEL, [ModelConfig(path=path)]) == {
            "width": 8,
            "depth": 2,
        }
    with pytest.raises(StateError, match="dit: no model files for it"):
        denoiser_config(MODEL, [ModelConfig(path=weights_of(here / "model")["vae"])])


def test_a_flag_says_which_of_two_experts_a_file_is(tmp_path: Path) -> None:
    given = ModelConfig(
        path=weights(tmp_path / "high/a.safetensors", "net.old.weight"),
        component="dit2",
    )
    (files,) = assign([given], (DIT, EXPERT), ()).values()
    assert (files.prefix, files.checkpoint_format) == ("net.", OLD)
    with pytest.raises(StateError, match="matches none of dit2"):
        assign(
            [replace(given, path=weights(tmp_path / "b.safetensors", "strange"))],
            (DIT, EXPERT),
            (),
        )


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("transformer/x*", "dit"),
        ("low/x*", "dit2"),
        ("a/words/", "words"),
        ("a/x", ""),
        ("x*.pth", ""),
        ("lower/x", ""),
    ],
)
def test_a_pattern_may_name_a_components_folder_of_any_depth(
    pattern: str, name: str
) -> None:
    words = Component(
        "words", SimpleNamespace(), "tokenizer", other_folders=("a/words",)
    )
    assert component_at(ModelConfig(None, "A/B", pattern), (DIT, EXPERT, words)) == name


@pytest.mark.parametrize(
    ("names", "content", "wanted"),
    [
        (["new.weight"], {"width": 5}, {"width": 5}),
        (["new.weight"], {"dim": 5}, {"width": 5, "depth": 1}),
        (["old.weight", "more"], {"dim": 5}, {"width": 5, "depth": 2}),
        (["old.weight"], {"width": 5}, {"inferred": (2, 3)}),
        (["foreign.weight"], {"dim": 5}, {"inferred": (2, 3)}),
        (["net.new.weight"], {"width": 5}, {"inferred": (2, 3)}),
        (["net.old.weight", "vae.x"], {"dim": 5}, {"width": 5, "depth": 1}),
    ],
    ids=[
        "own",
        "own names, old content",
        "old",
        "not old content",
        "not known",
        "behind a prefix",
        "old, behind one",
    ],
)
def test_a_configuration_beside_another_layout_is_translated_or_left_aside(
    names: list[str], content: dict[str, int], wanted: dict[str, Any], tmp_path: Path
) -> None:
    path = weights(tmp_path / "x.safetensors", *names)
    (tmp_path / "config.json").write_text(json.dumps(content))
    vae = Component("vae", SimpleNamespace(), "vae", ("x",), prefixes=("vae.",))
    files = assign([ModelConfig(path=path)], (DIT, vae), ())["dit"]
    assert find_config(ConfigQuery(DIT, files)) == wanted


@pytest.mark.parametrize("text", ["a model of mine", "[]", '"x"'])
def test_a_header_whose_config_is_none_is_as_one_without(
    text: str, tmp_path: Path
) -> None:
    files = Files(
        (Path(weights(tmp_path / "x.safetensors", "new.weight", config=text)),)
    )
    assert find_config(ConfigQuery(DIT, files)) == {"inferred": (2, 3)}


@pytest.mark.parametrize(
    "translating", [True, False], ids=["through a layout", "as it is"]
)
@pytest.mark.parametrize(
    ("network", "own", "others"),
    [
        (
            DiffusersNetwork("AutoencoderKL"),
            {"_class_name": "AutoencoderKL"},
            (
                {"_class_name": "FluxTransformer2DModel"},
                {"architectures": ["T5EncoderModel"]},
            ),
        ),
        (
            TransformersNetwork("T5EncoderModel", "T5Config"),
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            (
                {"_class_name": "AutoencoderKL"},
                {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"},
            ),
        ),
    ],
    ids=["diffusers", "transformers"],
)
def test_a_configuration_beside_several_components_is_that_of_the_class_it_names(
    network: DiffusersNetwork | TransformersNetwork,
    own: dict[str, Any],
    others: Any,
    translating: bool,
    tmp_path: Path,
) -> None:
    formats = (
        (CheckpointFormat(("old.weight",), configuration=same_config),)
        if translating
        else ()
    )
    component = replace(DIT, network=network, formats=formats)
    files = Files((Path(weights(tmp_path / "x.safetensors", "new.weight")),))
    for content in (own, {}):
        (tmp_path / "config.json").write_text(json.dumps({**content, "size": 5}))
        assert find_config(ConfigQuery(component, files)) == {**content, "size": 5}
    for content in others:
        (tmp_path / "config.json").write_text(json.dumps({**content, "size": 5}))
        assert find_config(ConfigQuery(component, files)) == {"inferred": (2, 3)}


def test_a_configuration_of_an_experts_own_folder_is_translated_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path))
    (tmp_path / "A/B/low").mkdir(parents=True)
    (tmp_path / "A/B/low/config.json").write_text('{"dim": 5}')
    assert find_config(ConfigQuery(EXPERT, None, ModelSource("A/B", hub=None))) == {
        "width": 5,
        "depth": 0,
    }
    with pytest.raises(
        StateError, match=r"no configuration of dit: .* model id A/B is not known"
    ):
        find_config(ConfigQuery(DIT, None, ModelSource("A/B", hub=None)))


def test_the_tokenizer_is_found_in_a_folder_beside_files_that_lie_in_none(
    here: Path,
) -> None:
    shutil.copytree("models/Tiny/Tiny/tokenizer", "flat/some/words")
    shutil.rmtree("models")
    shutil.rmtree("model/tokenizer")
    shutil.copy("model/text_encoder/model-1-of-1.safetensors", "flat/text.safetensors")
    shutil.copy("model/text_encoder/config.json", "flat/config.json")
    parts = tuple(
        replace(c, other_folders=("some/words",)) if c.is_folder else c
        for c in COMPONENTS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.family.COMPONENTS", parts)
        found = find(
            MODEL,
            [ModelConfig(path="flat/text.safetensors")],
            ["text_encoder", "tokenizer"],
        )
    assert found.files["tokenizer"].paths == (Path("flat/some/words"),)
