"""`dstrain generate`: what is made is written; what would be ignored is refused."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import (
    Diverged,
    GenerateConfig,
    OutOfMemory,
    Pipeline,
    StateError,
    SystemFault,
    UsageError,
    generate,
)
from dstrain.config import LoraFile, NamedInput, parse_lora
from dstrain.pipeline.loading import Loader
from dstrain.plugin.functional import tensor_to_image
from dstrain.training import LESS_MEMORY
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support import family
from tests.support.family import weights_of, write
from tests.support.generating import generation, pixels, texts
from tests.support.runs import configs, project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading fails: what is refused is refused before it."""
    monkeypatch.delattr(Pipeline, "from_found")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> GenerateConfig:
    return generation(model, tmp_path / "x.png")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)]
)
def test_generate_writes_what_the_pipeline_makes(
    precision: str,
    dtype: torch.dtype,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = {"negative_prompt": "cat", "guidance_scale": 2.0, "seed": 5}
    flags |= {"num_inference_steps": 3, "height": 24, "width": 16}
    output = tmp_path / "new/folder/x.png"
    generate(generation(model, output, mixed_precision=precision, **flags))
    assert str(output) in capsys.readouterr().out
    pipe = Pipeline.from_pretrained("tiny", configs(model), torch_dtype=dtype)
    assert pixels(output) == pipe(prompt="dog", **flags).tobytes()


def test_a_dry_run_says_what_would_be_made_of_what_and_loads_no_weights(
    config: GenerateConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def place(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Loader, "place", place)
    planned = replace(config, dry_run=True, height=16, width=24)
    generate(planned)
    page = capsys.readouterr().out
    assert f"{config.output}: 24 x 16, 1 step\n" in page
    for name in ("dit", "text_encoder", "vae"):
        assert f"    {name}: " in page
    assert "to fetch" not in page
    elsewhere = json.loads(config.model_paths or "")
    elsewhere[0] = ["/gone.safetensors"]
    generate(replace(planned, model_paths=json.dumps(elsewhere)))
    assert "/gone.safetensors" in capsys.readouterr().out.partition("to fetch")[2]
    config.output.touch()
    with pytest.raises(UsageError, match="--output"):
        generate(planned)


def test_a_terminal_shows_the_steps_and_that_the_latents_are_decoded(
    config: GenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    Image.new("RGB", (16, 16)).save(config.output.with_name("start.png"))
    start = NamedInput("input_image", str(config.output.with_name("start.png")))
    generate(
        replace(config, num_inference_steps=2, denoising_strength=0.5, input=(start,))
    )
    assert all(one in terminal.getvalue() for one in ("generate 0%", "decode 100%"))
    assert texts(config.output)["denoising_strength"] == "0.5"


def test_loras_and_their_scales_act(config: GenerateConfig, tmp_path: Path) -> None:
    here = project(tmp_path)
    lora = train(here, learning_rate=0.1, lora_alpha=8.0) / "epoch-0.safetensors"
    images = {}
    for scales in ((), (0.0,), (1.0,), (0.5, 0.5)):
        files = tuple(LoraFile(lora, scale) for scale in scales)
        generate(replace(config, lora=files, overwrite=True))
        images[scales] = np.asarray(Image.open(config.output)).astype(int)
    assert np.array_equal(images[()], images[(0.0,)])
    assert np.abs(images[(1.0,)] - images[(0.5, 0.5)]).max() <= 1
    assert np.abs(images[(1.0,)] - images[()]).max() > 5
    more = {}
    for key, one in load_file(lora).items():
        name = key.removeprefix("transformer.").replace(".weight", ".default.weight")
        more |= {name: one, name.replace("blocks.0", "blocks.9"): one.clone()}
    save_file(more, tmp_path / "more.safetensors")
    file = parse_lora(f"dit={tmp_path / 'more.safetensors'}@alpha=rank@skip_missing")
    generate(replace(config, lora=(file,), overwrite=True))
    assert np.array_equal(np.asarray(Image.open(config.output)), images[(1.0,)])
    other = LoraFile(lora, component="text_encoder")
    with pytest.raises(StateError, match="dit, not for text_encoder"):
        generate(replace(config, lora=(other,), overwrite=True))


def test_a_file_that_is_there_is_replaced_only_if_asked_for(
    config: GenerateConfig, tmp_path: Path
) -> None:
    generate(config)
    before = config.output.read_bytes()
    dangling = tmp_path / "b.png"
    dangling.symlink_to(tmp_path / "elsewhere" / "b.png")
    for output in (config.output, dangling):
        with pytest.raises(UsageError, match=f"{output.name}.*\n.*--overwrite") as bad:
            generate(replace(config, prompt="cat", output=output))
        assert bad.value.where == "--output"
    assert config.output.read_bytes() == before
    assert dangling.is_symlink()
    generate(replace(config, prompt="cat", overwrite=True))
    assert config.output.read_bytes() != before


def test_a_png_says_what_it_was_generated_from_and_no_other_file(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "cactus-flower")
    lora = train(project(tmp_path), max_steps=1, save_steps=1) / "step-1.safetensors"
    about = {"prompt": "dög, 犬, cactus-flower \udcff", "seed": 5}
    generate(replace(config, lora=(LoraFile(lora, 0.5),), **about))
    assert texts(config.output) == {
        "prompt": "dög, 犬, *** ?",
        "seed": "5",
        "num_inference_steps": "1",
        "guidance_scale": "1",
        "model": "tiny base",
        "LoRA": "step-1.safetensors:0.5",
    }
    guided = {"guidance_scale": 2.5, "negative_prompt": "blurry"}
    generate(replace(config, overwrite=True, **guided))
    found = texts(config.output)
    assert (found["guidance_scale"], found["negative_prompt"]) == ("2.5", "blurry")
    assert found["seed"] == "0" and "LoRA" not in found
    generate(replace(config, output=tmp_path / "a.webp"))
    assert texts(tmp_path / "a.webp") == {}


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("name", ["x.psd", "x.xbm", "x.h5", "x.what", "x", ""])
def test_an_output_that_cannot_be_written_is_refused_before_loading(
    name: str, config: GenerateConfig, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        generate(replace(config, output=tmp_path / name))
    assert refused.value.where == "--output"
    (tmp_path / "file").write_text("")
    with pytest.raises((SystemFault, OSError), match="file"):
        generate(replace(config, output=tmp_path / "file/x.png"))


@pytest.mark.usefixtures("unloaded")
def test_a_lora_file_that_is_not_there_is_refused_before_loading(
    config: GenerateConfig, tmp_path: Path
) -> None:
    (tmp_path / "there").write_text("")
    for lora, named in (
        (LoraFile(tmp_path / "no.safetensors"), f"^.*{tmp_path}/no.safetensors: "),
        (parse_lora(f"dti={tmp_path}/no.safetensors"), "dti=.*no such LoRA"),
    ):
        with pytest.raises(StateError, match=named):
            there = LoraFile(tmp_path / "there")
            generate(replace(config, lora=(there, lora)))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("flags", "where", "missing"),
    [
        ({"negative_prompt": "blurry"}, "--negative_prompt", "--guidance_scale"),
        (
            {"negative_prompt": "blurry", "guidance_scale": 1.0},
            "--negative_prompt",
            "--guidance_scale",
        ),
        (
            {"input": (NamedInput("negative_prompt", "blurry"),)},
            "--input negative_prompt",
            "--guidance_scale",
        ),
        (
            {"input": (NamedInput("input_image", "a.png"),)},
            "--input input_image",
            "--denoising_strength",
        ),
        ({"num_frames": 5}, "--num_frames", "'num_frames'"),
        (
            {"variant": "other", "input": (NamedInput("moood", "calm"),)},
            "--input moood",
            "'mood'",
        ),
        ({"denoising_strength": 0.5}, "--denoising_strength", "input_image"),
        ({"seed": 2**65}, "--seed", str(2**65)),
    ],
)
def test_what_would_be_ignored_or_refused_is_refused_before_loading(
    flags: dict[str, Any],
    where: str,
    missing: str,
    config: GenerateConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (16, 16)).save("a.png")
    with pytest.raises(UsageError, match=missing) as refused:
        generate(replace(config, **flags))
    assert refused.value.where == where


def decode_nan(latents: Any, *, vae: Any) -> family.DecodedImage:
    return {"image": tensor_to_image(latents[:, :3] * float("nan"))}


def predict_infinity(
    noisy_latents: Any, timestep: Any, prompt_emb: Any, prompt_mask: Any, *, dit: Any
) -> Any:
    return noisy_latents / 0


@pytest.mark.parametrize(
    "change", [{"decoders": (decode_nan,)}, {"model_fn": predict_infinity}]
)
def test_what_is_not_finite_is_no_image(
    change: dict[str, Any], config: GenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(family.BASE, **change)
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    with pytest.raises(Diverged):
        generate(config)
    assert not [*config.output.parent.rglob("*.png")]


@pytest.mark.parametrize("component", ["dit", "vae"])
def test_weights_that_are_at_fault_for_an_image_are_named(
    component: str, tmp_path: Path
) -> None:
    write(tmp_path / "model")
    for path in weights_of(tmp_path / "model")[component]:
        weights = {name: one / 0 for name, one in load_file(path).items()}
        save_file(weights, path)
    with pytest.raises(StateError, match=f"weights of {component} in ") as caught:
        generate(generation(tmp_path / "model", tmp_path / "a.png"))
    assert caught.value.exit_code == 3
    assert not (tmp_path / "a.png").exists()


def test_a_lack_of_memory_is_explained(
    config: GenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(latents: Any, *, vae: Any) -> family.DecodedImage:
        raise MemoryError

    spec = replace(family.BASE, decoders=(full,))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    with pytest.raises(OutOfMemory) as caught:
        generate(config)
    assert caught.value.help_lines == LESS_MEMORY
