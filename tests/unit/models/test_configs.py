"""Which of equal networks a file is, and whose configuration lies beside it."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import (
    GenerateConfig,
    ModelConfig,
    Pipeline,
    StateError,
    UsageError,
    generate,
    run,
)
from dstrain.models import assign
from dstrain.models.configs import find_config
from dstrain.plugin import (
    CheckpointFormat,
    Component,
    DiffusersNetwork,
    Files,
    KeyMap,
    TransformersNetwork,
    same_config,
)
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, MODEL, weights_of
from tests.support.runs import config, train

Shapes = Mapping[str, tuple[int, ...]]


def translated(content: Mapping[str, Any], shapes: Shapes) -> Mapping[str, Any] | None:
    """The configuration of the layout OLD, with a number that only the weights tell."""
    if "dim" not in content:
        return None
    return {"width": content["dim"], "depth": len(shapes)}


OLD = CheckpointFormat(
    ("old.weight",), (KeyMap("new", "old"),), configuration=translated
)
FOREIGN = CheckpointFormat(("foreign.weight",), (KeyMap("new", "foreign"),))


def part(name: str, folder: str, other: str, **fields: Any) -> Component:
    formats = {"formats": (OLD, FOREIGN), "prefixes": ("net.",)}
    given: dict[str, Any] = {"key_patterns": ("new.weight",), **formats, **fields}
    others = {"other_folders": (other,)}
    return Component(name, SimpleNamespace(), folder, **others, **given)


DIT = part(
    "dit",
    "transformer",
    "high",
    infer=lambda shapes: {"inferred": shapes["new.weight"]},
)
EXPERT = part("dit2", "transformer_2", "low")


def weights(path: Path, *names: str, **header: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(2, 3) for name in names}, path, header or None)
    return str(path)


def beside(folder: Path, content: Any, *names: str, **header: str) -> Files:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return Files((Path(weights(folder / "x.safetensors", *names, **header)),))


@pytest.mark.parametrize("content", ["{", "[" * 100_000])
def test_a_damaged_configuration_is_named(content: str, tmp_path: Path) -> None:
    files = beside(tmp_path, content, "new.weight")
    with pytest.raises(StateError) as caught:
        find_config(DIT, files)
    assert caught.value.where == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("given", "wanted", "found"),
    [
        # By their folders, else by their order.
        ("low/a high/a", "", "high/a low/a"),
        ("x/a high/a", "", "high/a x/a"),
        ("x/b x/a", "", "x/b x/a"),
        ("x/a x/a", "", "x/a"),
        ("x/a", "", "x/a"),
        ("x/a x/b x/c", "", r"dit: .*x/a\S+ and .*x/c"),
        ("low/a low/b", "", r"dit2: .*low/a\S+ and .*low/b"),
        # The header of a trained file says it, wherever that is.
        ("out/step-2@dit2 x/a", "", "x/a out/step-2"),
        ("x/a out/step-2@dit2", "", "x/a out/step-2"),
        ("high/step-2@dit2 high/a", "", "high/a high/step-2"),
        ("out/other@vae x/a", "", "out/other x/a"),
        ("out/step-2@dit2 low/a", "", r"dit2: .*out/step-2\S+ and .*low/a"),
        # What nothing tells is the one that is wanted.
        ("x/a", "dit2", "- x/a"),
        ("x/a", "dit dit2", "x/a"),
        ("x/a x/b", "dit2", "x/a x/b"),
        ("x/a high/a", "dit", "high/a x/a"),
        ("x/a low/a", "dit2", "x/a low/a"),
    ],
)
def test_experts_are_distinguished_by_header_folder_order_or_what_is_wanted(
    given: str, wanted: str, found: str, tmp_path: Path
) -> None:
    configs = []
    for one in given.split():
        place, _, component = one.partition("@")
        header = {"component": component} if component else {}
        path = weights(tmp_path / f"{place}.safetensors", "new.weight", **header)
        configs.append(ModelConfig(path))
    if " and " in found:
        with pytest.raises(UsageError, match=found):
            assign(configs, (DIT, EXPERT), wanted.split())
        return
    names = zip(("dit", "dit2"), found.split(), strict=False)
    assert {
        name: files.paths[0].relative_to(tmp_path).with_suffix("").as_posix()
        for name, files in assign(configs, (DIT, EXPERT), wanted.split()).items()
    } == {name: place for name, place in names if place != "-"}


def test_a_flag_says_which_of_two_experts_a_file_is(tmp_path: Path) -> None:
    path = weights(tmp_path / "high/a.safetensors", "net.old.weight")
    given = ModelConfig(path, component="dit2")
    ((name, files),) = assign([given], (DIT, EXPERT), ()).items()
    assert name == "dit2"
    assert (files.prefix, files.checkpoint_format) == ("net.", OLD)
    strange = replace(given, path=weights(tmp_path / "b.safetensors", "strange"))
    with pytest.raises(StateError, match=r"b\.safetensors: .* dit2;"):
        assign([strange], (DIT, EXPERT), ())


OF_EXPERTS = (
    COMPONENTS[0],
    replace(COMPONENTS[0], name="dit2", folder="transformer_2"),
    *COMPONENTS[1:],
)
FAMILY = replace(MODEL, name="experts", components=f"{__name__}:OF_EXPERTS")


def test_no_file_is_an_expert_that_the_variant_lacks(
    here: Path, fake_plugin: Callable[..., Path]
) -> None:
    """Each file tells the configuration of the first, which the variants have alone."""
    fake_plugin("plugin-experts", {"experts": f"{__name__}:FAMILY"}, {})
    shards, *others = weights_of(here / "model").values()
    whole = {name: one for path in shards for name, one in load_file(path).items()}
    paths = [here / "flat/one.safetensors", here / "flat/transformer_2/two.safetensors"]
    for path in paths:
        path.parent.mkdir(parents=True)
        save_file(whole, path)
        (path.parent / "config.json").write_text('{"width": 8, "depth": 2}')
        own = {"model": "experts", "model_paths": json.dumps([str(path), *others])}
        train(here, output_path=here / path.stem, max_steps=1, **own)
    both = [*map(str, paths), *others]
    flags = {"model": "experts", "model_paths": json.dumps(both)}
    made = {"variant": "base", "output": here / "made.png", "prompt": "dog"}
    cached = {"task": "sft:data_process", "feature_cache": here / "cache"}
    opens: tuple[Callable[[], Any], ...] = (
        lambda: train(here, **flags),
        lambda: run(config(here, **cached, **flags)),
        lambda: Pipeline.from_pretrained(
            "experts", list(map(ModelConfig, both)), "base"
        ),
        lambda: generate(GenerateConfig(**made, **flags)),
    )
    for opening in opens:
        with pytest.raises(UsageError, match=r"dit: .*one\.safe\S+ and .*two\.safe"):
            opening()
    lacking = {**flags, "model_paths": json.dumps(others)}
    with pytest.raises(StateError, match="dit: "):
        train(here, **lacking)


@pytest.mark.parametrize(
    ("names", "content", "wanted"),
    [
        ("new.weight", {"width": 5}, {"width": 5}),
        ("new.weight", {"dim": 5}, {"width": 5, "depth": 1}),
        ("old.weight more", {"dim": 5}, {"width": 5, "depth": 2}),
        ("old.weight", {"width": 5}, {"inferred": (2, 3)}),
        ("foreign.weight", {"dim": 5}, {"inferred": (2, 3)}),
        ("net.new.weight", {"width": 5}, {"inferred": (2, 3)}),
        ("net.old.weight vae.x", {"dim": 5}, {"width": 5, "depth": 1}),
    ],
)
def test_a_configuration_beside_another_layout_is_translated_or_left_aside(
    names: str, content: dict[str, int], wanted: dict[str, Any], tmp_path: Path
) -> None:
    (path,) = beside(tmp_path, content, *names.split()).paths
    vae = Component("vae", SimpleNamespace(), "vae", ("x",), prefixes=("vae.",))
    files = assign([ModelConfig(path)], (DIT, vae), ())["dit"]
    assert find_config(DIT, files) == wanted


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("weight", {}),
        ("weight", {"out_features": 3}),
        ("weight", {"bias": True}),
        ("a", {}),
    ],
)
def test_weights_tell_the_only_published_configuration_that_they_fit(
    name: str, other: dict[str, Any], tmp_path: Path
) -> None:
    """Which several models may have; of layers without a bias nothing tells that."""
    is_told = name == "weight" and "bias" not in other
    one = {"in_features": 3, "out_features": 2, "bias": False}
    known = {"A/A": one, "A/B": {**one, **other}}
    linear = DiffusersNetwork("torch.nn:Linear")
    component = Component("linear", linear, "x", (name,), default_configs=known)
    path = Path(weights(tmp_path / "x.safetensors", name))
    given = (component, Files((path,)))
    told: AbstractContextManager[Any] = nullcontext()
    with told if is_told else pytest.raises(StateError, match="linear"):
        assert find_config(*given) == one


@pytest.mark.parametrize("translating", [True, False])
@pytest.mark.parametrize(
    ("network", "own", "others"),
    [
        (
            DiffusersNetwork("diffusers:AutoencoderKL"),
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
        (
            TransformersNetwork("T5EncoderModel", "T5Config"),
            {"architectures": ["T5EncoderModel"], "model_type": "umt5"},
            ({"architectures": None, "model_type": "umt5"},),
        ),
    ],
    ids=["diffusers", "transformers", "transformers by class"],
)
def test_a_configuration_beside_several_components_is_that_of_the_class_it_names(
    network: DiffusersNetwork | TransformersNetwork,
    own: dict[str, Any],
    others: Any,
    translating: bool,
    tmp_path: Path,
) -> None:
    layout = CheckpointFormat(("old.weight",), configuration=same_config)
    formats = (layout,) if translating else ()
    component = replace(DIT, network=network, formats=formats)
    for content in (own, {}, *others):
        content = {**content, "size": 5}
        given = (component, beside(tmp_path, content, "new.weight"))
        is_own = content.items() <= {**own, "size": 5}.items()
        wanted = content if is_own else {"inferred": (2, 3)}
        assert find_config(*given) == wanted
