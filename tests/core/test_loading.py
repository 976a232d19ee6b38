"""Model files are found, recognised and opened only where needed; what is missing is named with its place."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.components import Component, Files, Layout, Row, same_configuration
from dstrain.config import GenerateConfig
from dstrain.errors import StateError, UsageError
from dstrain.generate_dataset import generate_dataset
from dstrain.loading import add_lora, load_pipeline
from dstrain.lora import LoraSpec, inject, save_lora
from dstrain.model_files import (
    ModelConfig,
    assign,
    configuration,
    denoiser_configuration,
    find,
    model_base,
    published_as,
)
from dstrain.networks import Network, TransformersNetwork
from dstrain.pipeline import Pipeline
from dstrain.runner import run
from family import COMPONENTS, FOLDERS, MODEL, build, weights_of, write
from runs import config, files, project, same, train
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh project as the working directory, with a copy of its model under a model id."""
    monkeypatch.delenv("DSTRAIN_MODEL_BASE_PATH", raising=False)
    monkeypatch.delenv("DIFFSYNTH_MODEL_BASE_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    shutil.copytree("model", "models/Tiny/Tiny")
    return tmp_path


def configs(folder: Path) -> tuple[ModelConfig, ...]:
    return tuple(ModelConfig(path=paths) for paths in weights_of(folder).values())


def opened(folder: Path, *more: ModelConfig) -> Pipeline:
    found = find(MODEL, (*configs(folder), *more), [component.name for component in COMPONENTS])
    return load_pipeline(MODEL, build("base"), found, torch.device("cpu"), torch.float32)


IDS = ",".join(f"Tiny/Tiny:{folder}/model*.safetensors" for folder in FOLDERS.values())


def test_paths_lists_of_paths_and_model_ids_train_the_same(here: Path) -> None:
    paths = weights_of(here / "model")
    flat = json.dumps([*paths["dit"], paths["text_encoder"], paths["vae"][0]])
    nested = json.dumps([paths["vae"], paths["dit"], paths["text_encoder"][0]])
    mixed = json.dumps([paths["dit"]])
    ids = ",".join(IDS.split(",")[1:])
    ways: dict[str, dict[str, Any]] = {
        "nested": {"model_paths": nested},
        "ids": {"model_paths": None, "model_id_with_origin_paths": IDS},
        "mixed": {"model_paths": mixed, "model_id_with_origin_paths": ids},
    }
    made = [files(train(here, output_path=here / name, max_steps=2, **flags)) for name, flags in ways.items()]
    assert same(made[0], made[1])
    assert same(made[0], made[2])
    with pytest.raises(StateError, match="is none of dit"):  # each path of a flat list is a set of its own
        train(here, output_path=here / "flat", model_paths=flat)


@pytest.mark.parametrize("variable", ["DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH"])
def test_model_ids_lie_where_the_environment_says(variable: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_base() == Path("models")
    shutil.move("models", "elsewhere")
    flags = {"model_paths": None, "model_id_with_origin_paths": IDS, "max_steps": 1}
    with pytest.raises(StateError, match=r"models/Tiny/Tiny/transformer/model\*\.safetensors: no file matches"):
        train(here, **flags)
    monkeypatch.setenv(variable, str(here / "elsewhere"))
    train(here, **flags)


def test_a_path_that_does_not_exist_is_named(here: Path) -> None:
    paths = [*weights_of(here / "model").values()]
    paths[0] = [str(here / "model/transformer/nothing.safetensors")]
    with pytest.raises(StateError, match=r"transformer/nothing\.safetensors: does not exist"):
        train(here, model_paths=json.dumps(paths))


def test_files_that_are_no_component_are_named_with_what_is_in_them(model: Path) -> None:
    stranger = model / "stranger.safetensors"
    save_file({"conv.weight": torch.zeros(1)}, stranger)
    with pytest.raises(StateError, match=r"stranger\.safetensors: is none of dit, text_encoder, vae; .* conv.weight"):
        opened(model, ModelConfig(path=str(stranger)))
    both = {**load_file(weights_of(model)["vae"][0]), **load_file(weights_of(model)["text_encoder"][0])}
    save_file(both, stranger)
    with pytest.raises(StateError, match="fits text_encoder, vae alike"):
        opened(model, ModelConfig(path=str(stranger)))
    stranger.write_bytes(b"not a tensor")
    with pytest.raises(StateError, match=r"stranger\.safetensors"):
        opened(model, ModelConfig(path=str(stranger)))


def test_two_sets_of_files_for_one_component_are_refused_naming_both(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "second", seed=1)
    (vae,) = weights_of(tmp_path / "second")["vae"]
    with pytest.raises(UsageError, match=r"two sets of files are vae: .*model/vae/.* and .*second/vae/"):
        opened(model, ModelConfig(path=vae))
    opened(model, ModelConfig(path=weights_of(model)["vae"]))  # the same files again are no second set


def test_a_component_nobody_gave_is_asked_for(model: Path) -> None:
    with pytest.raises(StateError, match="vae: no model files for it on the command line"):
        find(MODEL, configs(model)[:2], ["dit", "vae"])


def test_a_configuration_comes_from_beside_the_header_the_model_id_or_the_table(here: Path) -> None:
    weights = here / "model/transformer"
    content = json.loads((weights / "config.json").read_text())
    by_path = [ModelConfig(path=weights_of(here / "model")["dit"])]
    assert find(MODEL, by_path, ["dit"]).contents["dit"] == content
    (weights / "config.json").unlink()
    with pytest.raises(StateError) as caught:
        find(MODEL, by_path, ["dit"])
    for way in (f"{weights}/config.json", "the shapes do not tell it", r"model id (none) is not known", "Tiny/Tiny"):
        assert way in str(caught.value)
    by_id = [ModelConfig(None, "Tiny/Tiny", "transformer/model*.safetensors")]
    assert find(MODEL, by_id, ["dit"]).contents["dit"] == content
    (here / "models/Tiny/Tiny/transformer/config.json").unlink()
    assert find(MODEL, by_id, ["dit"]).contents["dit"] == {"width": 8, "depth": 2}
    one = {name: value for path in weights_of(here / "model")["dit"] for name, value in load_file(path).items()}
    save_file(one, here / "alone.safetensors", {"config": json.dumps({"width": 8, "depth": 2, "dropout": 0.5})})
    alone = find(MODEL, [ModelConfig(path=str(here / "alone.safetensors"))], ["dit"])
    assert alone.contents["dit"]["dropout"] == 0.5


def test_a_configuration_alone_needs_no_weights(here: Path) -> None:
    shutil.rmtree(here / "models/Tiny/Tiny/transformer")
    by_id = [ModelConfig(None, "Tiny/Tiny", "transformer/model*"), ModelConfig(None, "Tiny/Tiny", "vae/model*")]
    found = find(MODEL, by_id, ["vae"], bare=["dit"])
    assert set(found.files) == {"vae"}
    assert found.contents["dit"] == {"width": 8, "depth": 2}


def test_a_component_may_infer_its_configuration_from_shapes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(shapes: Any) -> dict[str, int] | None:
        return {"width": shapes["embed.weight"][1]} if "embed.weight" in shapes else None

    parts = tuple(replace(part, infer=infer) if part.name == "text_encoder" else part for part in COMPONENTS)
    monkeypatch.setattr("family.COMPONENTS", parts)
    (model / "text_encoder/config.json").unlink()
    assert find(MODEL, configs(model), ["text_encoder"]).contents["text_encoder"] == {"width": 8}


def test_the_tokenizer_is_found_beside_by_id_by_the_default_id_or_by_its_flag(here: Path) -> None:
    default = here / "models/Tiny/Tiny/tokenizer"
    for name, place in (("beside", here / "model/tokenizer"), ("other id", here / "models/Other/One/tokenizer")):
        shutil.copytree(default, place, dirs_exist_ok=True)
        assert place.is_dir(), name
    shutil.copytree("model/text_encoder", "models/Other/One/text_encoder")

    def tokenizer(*given: ModelConfig) -> Path:
        found = find(MODEL, given, ["text_encoder", "tokenizer"])
        return found.files["tokenizer"].paths[0].resolve()

    by_path = ModelConfig(path=weights_of(here / "model")["text_encoder"])
    by_id = ModelConfig(None, "Other/One", "text_encoder/model*.safetensors")
    assert tokenizer(by_path) == here / "model/tokenizer"
    assert tokenizer(by_id) == here / "models/Other/One/tokenizer"
    alone = find(MODEL, [ModelConfig(None, "Other/One", "text_encoder/model*.safetensors")], ["tokenizer"])
    assert (
        alone.files["tokenizer"].paths[0].resolve() == here / "models/Other/One/tokenizer"
    )  # whose files are not read
    flag = ModelConfig(path=str(here / "anything"), component="tokenizer")
    shutil.copytree(default, "anything")
    assert tokenizer(by_path, flag) == here / "anything"
    shutil.rmtree("model/tokenizer")
    shutil.rmtree("models/Other/One/tokenizer")
    assert tokenizer(by_path) == tokenizer(by_id) == default
    shutil.rmtree(default)
    with pytest.raises(StateError, match=r"tokenizer: not found in .*model/tokenizer.*Tiny/Tiny/tokenizer") as caught:
        tokenizer(by_path)
    assert "--tokenizer_path" in str(caught.value)


def test_the_tokenizers_flag_reaches_the_run(here: Path) -> None:
    shutil.move("model/tokenizer", "words")
    (here / "words/vocabulary.json").write_text(json.dumps({"offset": 7}))
    shutil.rmtree("models")
    with pytest.raises(StateError, match="tokenizer"):
        train(here, max_steps=1)
    one = files(train(here, max_steps=3, output_path=here / "one", family_options={"tokenizer_path": "words"}))
    (here / "words/vocabulary.json").write_text(json.dumps({"offset": 8}))
    other = files(train(here, max_steps=3, output_path=here / "other", family_options={"tokenizer_path": "words"}))
    assert not same(one, other)


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("trained", ["dit", "text_encoder"])
def test_a_stage_never_opens_the_files_it_does_not_need(trained: str, by_id: bool, here: Path) -> None:
    flags: dict[str, Any] = {"feature_cache": here / "cache", "trainable_models": trained, "max_steps": 2}
    if by_id:
        flags |= {"model_paths": None, "model_id_with_origin_paths": IDS}
    else:
        flags |= {"model_paths": json.dumps([*weights_of(here / "model").values()])}
    place = here / ("models/Tiny/Tiny" if by_id else "model")
    whole = files(train(here, output_path=here / "whole", **flags))
    needed = {"sft:data_process": {"vae"}, "sft:train": {"transformer", "text_encoder", "tokenizer"}}
    if trained == "dit":
        needed = {"sft:data_process": {"vae", "text_encoder", "tokenizer"}, "sft:train": {"transformer"}}
    shutil.move(place, "kept")
    if not by_id:
        shutil.rmtree("models")
    for stage, parts in needed.items():
        for part in parts:
            shutil.copytree(Path("kept") / part, place / part)
        run(config(here, task=stage, **flags))
        shutil.rmtree(place)
        shutil.rmtree("data", ignore_errors=True)
    assert same(whole, files(here / "out"))


def test_every_component_is_loaded_frozen_and_for_use(model: Path) -> None:
    pipeline = opened(model)
    assert set(pipeline.components) == {component.name for component in COMPONENTS}
    for name in FOLDERS:
        network = pipeline.components[name]
        assert not network.training
        assert not any(parameter.requires_grad for parameter in network.parameters())
        weights = {key: value for path in weights_of(model)[name] for key, value in load_file(path).items()}
        assert same(dict(sorted(network.state_dict().items())), dict(sorted(weights.items())))


def test_a_file_of_a_fully_trained_component_is_loaded_by_itself(here: Path) -> None:
    flags = {"trainable_models": "dit,text_encoder", "max_steps": 2}
    train(here, output_path=here / "out", **flags)
    saved = {name: here / f"out/step-2.{name}.safetensors" for name in ("dit", "text_encoder")}
    for name, path in saved.items():
        given = [ModelConfig(path=str(path)), *(c for c in configs(here / "model") if FOLDERS[name] not in str(c.path))]
        pipeline = Pipeline.from_pretrained("tiny", given)
        assert same(dict(sorted(pipeline.components[name].state_dict().items())), load_file(path))
        with safe_open(path, "pt") as file:
            assert json.loads(file.metadata()["config"])["width"] == 8
    given = [*saved.values(), *weights_of(here / "model")["vae"]]
    train(here, output_path=here / "again", model_paths=json.dumps([str(path) for path in given]), **flags)


def test_a_lora_goes_to_the_component_its_keys_name(model: Path, tmp_path: Path) -> None:
    for component, prefix in MODEL.lora_prefixes.items():
        source = opened(model).components[component]
        spec = LoraSpec(component, tuple(MODEL.lora_targets[component]), 2, 4.0)
        inject(source, spec, {})
        with torch.no_grad():
            for parameter in source.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        path = tmp_path / f"{component}.safetensors"
        save_lora(path, source, spec, prefix, {})
        pipeline = opened(model)
        add_lora(pipeline, path, 1.0)
        arguments = (torch.tensor([[1, 2]]),) if component == "text_encoder" else (
            torch.ones(1, 4, 2, 2), torch.ones(1), torch.ones(1, 3, 8), torch.ones(1, 3, dtype=torch.bool)
        )  # fmt: skip
        plain = opened(model).components[component](*arguments)
        wanted = source.eval()(*arguments)
        assert torch.equal(pipeline.components[component](*arguments), wanted)
        assert not torch.equal(plain, wanted)
        add_lora(pipeline, path, -1.0)  # a second one adds up
        assert torch.allclose(pipeline.components[component](*arguments), plain, atol=1e-5)
        others = set(MODEL.lora_prefixes) - {component}
        assert all(not hasattr(pipeline.components[name], "peft_config") for name in others)
    save_file({"unet.x.lora_A.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(StateError, match=r"begin with none of transformer\. \(dit\), .*the first is unet\.x"):
        add_lora(opened(model), tmp_path / "other.safetensors", 1.0)


def test_a_lora_of_another_family_is_named_as_one(model: Path, tmp_path: Path) -> None:
    save_file({"transformer.x.lora_A.weight": torch.ones(1)}, tmp_path / "other.safetensors", {"family": "other"})
    with pytest.raises(StateError, match="is a LoRA for other, and this is tiny"):
        add_lora(opened(model), tmp_path / "other.safetensors", 1.0)


def test_a_pipeline_is_opened_in_the_dtype_asked_for(model: Path) -> None:
    pipeline = Pipeline.from_pretrained("tiny", configs(model), torch_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in pipeline.components["dit"].parameters()} == {torch.bfloat16}
    assert (pipeline.dtype, pipeline.autocast) == (torch.bfloat16, torch.bfloat16)
    assert Pipeline.from_pretrained("tiny", configs(model), "other").wiring.variant == "other"
    with pytest.raises(UsageError, match=r"tiny has no variant 'othr'.*did you mean 'other'"):
        Pipeline.from_pretrained("tiny", configs(model), "othr")


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "w.safetensors").write_bytes(save({"w": torch.zeros(1)}))
    with pytest.raises(StateError, match=r"config\.json: cannot be read"):
        configuration(Component("dit", ("dit",), lambda *_: None, ("w",)), Files((tmp_path / "w.safetensors",)), "")


def translated(content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any] | None:
    """The configuration of the layout OLD: another name, and a number that only the weights tell."""
    if "dim" not in content:
        return None
    return {"width": content["dim"], "depth": len(shapes)}


OLD = Layout(("old.weight",), (Row("new", "old"),), configuration=translated)
FOREIGN = Layout(("foreign.weight",), (Row("new", "foreign"),))


def part(name: str, *folders: str, **fields: Any) -> Component:
    return Component(name, folders, lambda *_: None, **{"marks": ("new.weight",), "layouts": (OLD, FOREIGN), **fields})


DIT = part("dit", "transformer", "high", prefixes=("net.",), infer=lambda shapes: {"inferred": shapes["new.weight"]})
TWIN = part("dit2", "transformer_2", "low", prefixes=("net.",))


def weights(path: Path, *names: str, **header: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(2, 3) for name in names}, path, header or None)
    return str(path)


def assigned(*paths: str, wanted: tuple[str, ...] = ()) -> dict[str, str]:
    found = assign([ModelConfig(path=path) for path in paths], (DIT, TWIN), wanted)
    return {name: "/".join(files.paths[0].parts[-2:]) for name, files in found.items()}


def test_twins_are_told_apart_by_their_folders_else_by_their_order(tmp_path: Path) -> None:
    low, high, first, second, third = (
        weights(tmp_path / f"{place}.safetensors", "new.weight") for place in ("low/a", "high/a", "x/a", "x/b", "x/c")
    )
    assert assigned(low, high) == {"dit": "high/a.safetensors", "dit2": "low/a.safetensors"}
    assert assigned(first, high) == {"dit": "high/a.safetensors", "dit2": "x/a.safetensors"}
    assert assigned(second, first) == {"dit": "x/b.safetensors", "dit2": "x/a.safetensors"}
    assert assigned(first, first) == assigned(first) == {"dit": "x/a.safetensors"}
    with pytest.raises(UsageError, match=r"two sets of files are dit: .*x/a.safetensors and .*x/c.safetensors"):
        assigned(first, second, third)
    with pytest.raises(UsageError, match=r"two sets of files are dit2: .*low/a.safetensors and .*low/b.safetensors"):
        assigned(low, weights(tmp_path / "low/b.safetensors", "new.weight"))


def test_the_header_of_a_trained_file_says_which_of_twins_it_is_wherever_it_lies(tmp_path: Path) -> None:
    trained, elsewhere, other = (
        weights(tmp_path / f"{place}.safetensors", "new.weight", component=name)
        for place, name in (("out/step-2", "dit2"), ("high/step-2", "dit2"), ("out/other", "vae"))
    )
    flat, high = (weights(tmp_path / f"{place}.safetensors", "new.weight") for place in ("x/a", "high/a"))
    swapped = {"dit": "x/a.safetensors", "dit2": "out/step-2.safetensors"}
    assert assigned(trained, flat) == assigned(flat, trained) == swapped
    assert assigned(elsewhere, high) == {"dit": "high/a.safetensors", "dit2": "high/step-2.safetensors"}
    assert assigned(other, flat) == {"dit": "out/other.safetensors", "dit2": "x/a.safetensors"}
    with pytest.raises(UsageError, match=r"two sets of files are dit2: .*out/step-2.* and .*low/a"):
        assigned(trained, weights(tmp_path / "low/a.safetensors", "new.weight"))


def test_files_that_nothing_tells_are_the_one_twin_that_is_wanted(tmp_path: Path) -> None:
    flat, second, high, low = (
        weights(tmp_path / f"{place}.safetensors", "new.weight") for place in ("x/a", "x/b", "high/a", "low/a")
    )
    assert assigned(flat, wanted=("dit2",)) == assigned(flat, flat, wanted=("dit2",)) == {"dit2": "x/a.safetensors"}
    assert assigned(flat, wanted=("dit",)) == assigned(flat, wanted=("dit", "dit2")) == {"dit": "x/a.safetensors"}
    both = {"dit": "x/a.safetensors", "dit2": "x/b.safetensors"}
    assert assigned(flat, second, wanted=("dit2",)) == both
    assert assigned(flat, high, wanted=("dit",)) == {"dit": "high/a.safetensors", "dit2": "x/a.safetensors"}
    assert assigned(flat, low, wanted=("dit2",)) == {"dit": "x/a.safetensors", "dit2": "low/a.safetensors"}


@pytest.fixture
def twins(here: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A denoiser that may have two parts, in a family whose variants have only the first; two files for it."""
    twin = replace(COMPONENTS[0], name="dit2", folders=("transformer_2",))
    monkeypatch.setattr("family.COMPONENTS", (COMPONENTS[0], twin, *COMPONENTS[1:]))
    whole = {name: value for path in weights_of(here / "model")["dit"] for name, value in load_file(path).items()}
    paths = (here / "flat/one.safetensors", here / "flat/transformer_2/two.safetensors")
    for path in paths:
        path.parent.mkdir(parents=True)
        save_file(whole, path)
        (path.parent / "config.json").write_text(json.dumps({"width": 8, "depth": 2}))
    return str(paths[0]), str(paths[1])


def test_no_file_is_a_twin_that_the_variant_lacks(here: Path, twins: tuple[str, str]) -> None:
    others = [paths for name, paths in weights_of(here / "model").items() if name != "dit"]
    for one in twins:
        train(here, max_steps=1, output_path=here / Path(one).stem, model_paths=json.dumps([one, *others]))
    both = {"model_paths": json.dumps([*twins, *others])}
    prompts = here / "prompts.json"
    prompts.write_text(json.dumps([{"prompt": "dog", "seed": 1}]))
    made = {"model": "tiny", "variant": "base", "output": here / "made", **both}
    opens: tuple[Callable[[], Any], ...] = (
        lambda: train(here, **both),
        lambda: run(config(here, task="sft:data_process", feature_cache=here / "cache", **both)),
        lambda: Pipeline.from_pretrained("tiny", [ModelConfig(path=path) for path in (*twins, *others)], "base"),
        lambda: generate_dataset(GenerateConfig(**made), prompts),
    )
    for opening in opens:
        with pytest.raises(UsageError, match=r"two sets of files are dit: .*one\.safetensors and .*two\.safetensors"):
            opening()
    assert [path.name for path in (here / "made").iterdir()] == [".lock"], (
        "refused before anything is written or loaded"
    )


def test_the_files_of_one_part_alone_tell_the_denoisers_configuration(here: Path, twins: tuple[str, str]) -> None:
    for path in twins:
        assert denoiser_configuration(MODEL, [ModelConfig(path=path)]) == {"width": 8, "depth": 2}
    with pytest.raises(StateError, match="dit: no model files for it"):
        denoiser_configuration(MODEL, [ModelConfig(path=weights_of(here / "model")["vae"])])


def test_a_flag_says_which_of_twins_a_file_is(tmp_path: Path) -> None:
    given = ModelConfig(path=weights(tmp_path / "high/a.safetensors", "net.old.weight"), component="dit2")
    (files,) = assign([given], (DIT, TWIN), ()).values()
    assert (files.prefix, files.layout) == ("net.", OLD)
    with pytest.raises(StateError, match="is none of dit2"):
        assign([replace(given, path=weights(tmp_path / "b.safetensors", "strange"))], (DIT, TWIN), ())


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
def test_a_pattern_may_name_a_components_folder_of_any_depth(pattern: str, name: str) -> None:
    words = Component("words", ("tokenizer", "a/words"), lambda *_: None)
    assert published_as(ModelConfig(None, "A/B", pattern), (DIT, TWIN, words)) == name
    assert published_as(ModelConfig(path=pattern), (DIT, TWIN, words)) == ""


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
    ids=["own", "own names, old content", "old", "not old content", "not known", "behind a prefix", "old, behind one"],
)
def test_a_configuration_beside_another_layout_is_translated_or_left_aside(
    names: list[str], content: dict[str, int], wanted: dict[str, Any], tmp_path: Path
) -> None:
    path = weights(tmp_path / "x.safetensors", *names)
    (tmp_path / "config.json").write_text(json.dumps(content))
    vae = Component("vae", ("vae",), lambda *_: None, ("x",), prefixes=("vae.",))
    files = assign([ModelConfig(path=path)], (DIT, vae), ())["dit"]
    assert configuration(DIT, files, "") == wanted


@pytest.mark.parametrize("text", ["a model of mine", "[]", '"x"'])
def test_a_header_whose_config_is_none_is_as_one_without(text: str, tmp_path: Path) -> None:
    files = Files((Path(weights(tmp_path / "x.safetensors", "new.weight", config=text)),))
    assert configuration(DIT, files, "") == {"inferred": (2, 3)}


@pytest.mark.parametrize("translating", [True, False], ids=["through a layout", "as it is"])
@pytest.mark.parametrize(
    ("network", "own", "others"),
    [
        (
            Network("diffusers:AutoencoderKL"),
            {"_class_name": "AutoencoderKL"},
            ({"_class_name": "FluxTransformer2DModel"}, {"architectures": ["T5EncoderModel"]}),
        ),
        (
            TransformersNetwork("T5EncoderModel", "T5Config"),
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            ({"_class_name": "AutoencoderKL"}, {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"}),
        ),
    ],
    ids=["diffusers", "transformers"],
)
def test_a_configuration_beside_several_components_is_that_of_the_class_it_names(
    network: Network | TransformersNetwork, own: dict[str, Any], others: Any, translating: bool, tmp_path: Path
) -> None:
    layouts = (Layout(("old.weight",), configuration=same_configuration),) if translating else ()
    component = replace(DIT, configure=network.configure, layouts=layouts)
    files = Files((Path(weights(tmp_path / "x.safetensors", "new.weight")),))
    for content in (own, {}):
        (tmp_path / "config.json").write_text(json.dumps({**content, "size": 5}))
        assert configuration(component, files, "") == {**content, "size": 5}
    for content in others:
        (tmp_path / "config.json").write_text(json.dumps({**content, "size": 5}))
        assert configuration(component, files, "") == {"inferred": (2, 3)}


def test_a_configuration_of_an_experts_own_folder_is_translated_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path))
    (tmp_path / "A/B/low").mkdir(parents=True)
    (tmp_path / "A/B/low/config.json").write_text('{"dim": 5}')
    assert configuration(TWIN, None, "A/B") == {"width": 5, "depth": 0}
    with pytest.raises(StateError, match=r"no configuration of dit: .* model id A/B is not known"):
        configuration(DIT, None, "A/B")


def test_the_tokenizer_is_found_in_a_folder_beside_files_that_lie_in_none(here: Path) -> None:
    shutil.copytree("models/Tiny/Tiny/tokenizer", "flat/some/words")
    shutil.rmtree("models")
    shutil.rmtree("model/tokenizer")
    shutil.copy("model/text_encoder/model-1-of-1.safetensors", "flat/text.safetensors")
    shutil.copy("model/text_encoder/config.json", "flat/config.json")
    parts = tuple(replace(c, folders=("tokenizer", "some/words")) if c.is_folder else c for c in COMPONENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("family.COMPONENTS", parts)
        found = find(MODEL, [ModelConfig(path="flat/text.safetensors")], ["text_encoder", "tokenizer"])
    assert found.files["tokenizer"].paths == (Path("flat/some/words"),)
