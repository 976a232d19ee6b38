"""A script names a model by one word, by its files, or by both."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    GenerateConfig,
    LoraConfig,
    ModelConfig,
    Pipeline,
    StateError,
    TrainConfig,
    UsageError,
    generate,
    run,
    save_lora,
)
from dstrain.lora import inject
from dstrain.storage import CHECKSUM, read_tensors
from safetensors.torch import save_file

from tests.support.family import (
    COMPONENTS,
    FOLDERS,
    IDS,
    MODEL,
    build,
    weights_of,
    write,
)
from tests.support.generating import texts
from tests.support.runs import configs, opened, project, project_by_id, same, train

pytestmark = pytest.mark.usefixtures("tiny")
TWIN = replace(MODEL, name="twin")


def weights(pipe: Pipeline, name: str) -> dict[str, Any]:
    return dict(sorted(pipe.components[name].state_dict().items()))


def test_a_model_in_one_word_is_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project_by_id(tmp_path, monkeypatch)
    listed = Pipeline.from_pretrained("tiny", configs(here / "model"))
    by_files = Pipeline.from_pretrained(model_configs=configs(here / "model"))
    words = ("Tiny/Tiny", str(here / "model"), here / "model")
    shutil.copytree("model/vae", "models/Own/vae")
    ids = ["Own:vae/*.safetensors", *IDS.split(",")[:2]]
    by_ids = [ModelConfig(None, *one.split(":")) for one in ids]
    by_id = Pipeline.from_pretrained(model_configs=by_ids)
    for pipe in (by_files, by_id, *map(Pipeline.from_pretrained, words)):
        assert pipe.family.name == "tiny"
        assert all(same(weights(pipe, one), weights(listed, one)) for one in FOLDERS)


def test_a_configuration_gets_the_family_that_its_model_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_plugin: Callable[..., Path]
) -> None:
    here = project_by_id(tmp_path, monkeypatch)
    own = {"dataset_base_path": here / "data", "output_path": here / "out"}
    result = run(TrainConfig(model_id="Tiny/Tiny", lora_rank=2, max_steps=1, **own))
    assert result.step == 1
    folder = {"model_id": here / "model", "dry_run": True, "overwrite": True}
    assert run(TrainConfig(**folder, **own)).folder == here / "out"
    image = here / "dog.png"
    generate(GenerateConfig(run=here / "out", prompt="dog", output=image))
    assert texts(image)["model"] == "tiny base, Tiny/Tiny"
    for given, said in (({"model_id": 3}, "--model_id: .*3"), ({}, "--model: ")):
        with pytest.raises(UsageError, match=said):
            run(TrainConfig(toy=True, **given, **own))
    fake_plugin("plugin-twin", {"twin": f"{__name__}:TWIN"}, {})
    run(TrainConfig(disabled_plugins=("plugin-twin",), **folder, **own))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), r"from_pretrained\(\)"),
        (("tiny",), "'tiny'"),
        (("Tiny/Tinny",), "'Tiny/Tiny'"),
        ((Path("nowhere/tiny"),), "nowhere/tiny"),
        (("tiny", [ModelConfig("a", component="vaee")]), "'vaee'.*'vae'"),
        (("Tiny/Tiny", [ModelConfig("a", component="vaee")]), "'vaee'.*'vae'"),
        (("Nobody/Nothing-1",), r"(?s)Nobody/Nothing-1(?!.*--model).*model_configs"),
    ],
)
def test_what_names_no_model_is_refused_as_a_script_names_it(
    given: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        Pipeline.from_pretrained(*given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"variant": "othr"}, "--variant: .*'othr'.*'other'"),
        ({"hub": "hf"}, "--hub: .*modelscope, huggingface"),
        ({"device": "cudaa"}, r"\(device=\.\.\.\): 'cudaa'"),
        ({"device": "cuda:99"}, r"\(device=\.\.\.\): 'cuda:99'"),
    ],
)
def test_errors_of_loading_name_flags_and_note_the_parameters(
    given: dict[str, Any], said: str, model: Path
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        Pipeline.from_pretrained(str(model), **given)
    if said.startswith("--"):
        (note,) = caught.value.__notes__
        assert note.startswith("in a script: ") and "=" in note


def test_a_model_config_takes_a_file_or_a_list_by_position(model: Path) -> None:
    (file,) = weights_of(model)["vae"]
    for one in (ModelConfig(file), ModelConfig(Path(file)), ModelConfig([file])):
        assert one.files().paths == (Path(file),)
        assert replace(one) == one
    number: Any = 3
    with pytest.raises(UsageError, match=r"ModelConfig: path: .*3"):
        ModelConfig(number)


def test_a_pipeline_is_opened_in_the_dtype_and_as_the_variant_asked_for(
    model: Path, tmp_path: Path
) -> None:
    files = configs(model)
    for dtype in (torch.float16, torch.float64, torch.bfloat16):
        pipeline = Pipeline.from_pretrained("tiny", files, torch_dtype=dtype)
        assert pipeline.dtype == dtype
    assert set(pipeline.components) == {component.name for component in COMPONENTS}
    dtypes = {parameter.dtype for parameter in pipeline.components["dit"].parameters()}
    assert dtypes == {pipeline.dtype} == {torch.bfloat16}
    write(tmp_path / "other", "other")
    other = Pipeline.from_pretrained("tiny", configs(tmp_path / "other"), "other")
    assert other.spec.variant == "other"
    with pytest.raises(StateError, match=r"depth 2.*other .*1"):
        Pipeline.from_pretrained("tiny", files, "other")


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "text_encoder": (torch.tensor([[1, 2]]),),
    "dit": (
        torch.ones(1, 4, 2, 2),
        torch.ones(1),
        torch.ones(1, 3, 8),
        torch.ones(1, 3, dtype=torch.bool),
    ),
}


@pytest.mark.parametrize("component", MODEL.lora_prefixes)
def test_a_lora_goes_to_the_component_its_keys_name_and_a_second_adds_up(
    component: str, model: Path, tmp_path: Path
) -> None:
    source = opened(model).components[component]
    targets = tuple(MODEL.lora_targets[component])
    lora_config = LoraConfig(component, targets, 2, 4.0)
    inject(source, lora_config, {})
    for parameter in source.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    path = tmp_path / "lora.safetensors"
    save_lora(path, source, lora_config, MODEL.lora_prefixes[component], {})
    pipeline = opened(model)
    network = pipeline.components[component]
    arguments = ARGUMENTS[component]
    plain = network(*arguments)
    pipeline.load_lora(path, 1.0)
    wanted = source.eval()(*arguments)
    assert torch.equal(network(*arguments), wanted)
    assert not torch.equal(plain, wanted)
    pipeline.load_lora(path, -1.0)
    assert torch.allclose(network(*arguments), plain, atol=1e-5)
    for name in set(MODEL.lora_prefixes) - {component}:
        assert not hasattr(pipeline.components[name], "peft_config")


def test_what_a_lora_was_trained_for_and_on_is_reported_where_it_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = project(tmp_path)
    path = train(here, max_steps=1) / "step-1.safetensors"
    write(tmp_path / "further", seed=1)
    capsys.readouterr()
    opened(here / "model").load_lora(path, 1.0)
    assert capsys.readouterr().err == ""
    other = opened(tmp_path / "further")
    other.spec = build("other")
    other.load_lora(path, 1.0)
    variant, weights = capsys.readouterr().err.splitlines()
    assert str(path) in variant and "base" in variant and "other" in variant
    assert str(path) in weights and "model-1-of-2.safetensors" in weights


def test_a_header_tells_how_the_lora_was_made(tmp_path: Path) -> None:
    here = project(tmp_path)
    flags = {"lora_alpha": 3.0, "lora_target_modules": "to_q,text"}
    path = train(here, max_steps=1, **flags) / "step-1.safetensors"
    tensors, header = read_tensors(path)
    made = {"family": "tiny", "variant": "base", "component": "dit"}
    made |= {"rank": "2", "alpha": "3.0", "targets": "text,to_q"}
    assert made.items() <= header.items()
    assert json.loads(header["config"]) == {"width": 8, "depth": 2, "dropout": 0.0}
    assert len(json.loads(header["base"])["digest"]) == 40
    fewer = {key: one for key, one in tensors.items() if ".1.text" not in key}
    del header[CHECKSUM]
    save_file(fewer, path, header)
    opened(here / "model").load_lora(path)
