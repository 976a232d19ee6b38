"""R7: what a model cannot do is named, alike by `--dry_run` and by the run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain.cli.main import main
from dstrain.models import write_toy
from dstrain.registry import load_family
from imageio.v3 import imwrite
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.promise("R7", "bad input is named: limits of the models")

Sizes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Denoiser:
    """A denoiser that is another model's: a toy with these sizes, and what is said."""

    name: str
    family: str
    variant: str
    entries: Mapping[str, Any]
    said: str


DENOISERS = (
    Denoiser("Fill", "flux", "dev", {"in_channels": 384, "out_channels": 64},
             "has in_channels 384; variant dev takes 64\n  give --variant fill"),
    Denoiser("FLEX.2", "flux", "dev", {"in_channels": 196, "out_channels": 64},
             "is Flex.2-preview, which no variant of flux is for: it has in_channels 196; variant dev takes 64"),
    Denoiser("Canny", "flux", "kontext", {"in_channels": 128, "out_channels": 64},
             "is FLUX.1-Canny-dev or FLUX.1-Depth-dev, which no variant of flux is for"),
    Denoiser("unknown", "flux", "dev", {"in_channels": 80, "out_channels": 64},
             "has in_channels 80; variant dev takes 64"),
    Denoiser("LongCat", "wan", "t2v", {"num_attention_heads": 32, "num_layers": 48},
             "is LongCat-Video, which no variant of wan is for"),
    Denoiser("FLF2V", "wan", "i2v", {"pos_embed_seq_len": 514},
             "has pos_embed_seq_len 514; variant i2v takes none\n  give --variant flf2v"),
    Denoiser("Fun-Control", "wan", "ti2v-5b", {"in_channels": 48, "out_channels": 16},
             "has out_channels 16; variant ti2v-5b takes 48"),
    Denoiser("another variant", "wan", "t2v", {"in_channels": 36},
             "has in_channels 36; variant t2v takes 16\n  give --variant i2v-a14b"),
    Denoiser("Layered", "qwen_image", "base", {"use_layer3d_rope": True},
             "has use_layer3d_rope True; variant base takes none\n  give --variant layered"),
    Denoiser("unknown channels", "qwen_image", "edit", {"in_channels": 32},
             "has in_channels 32; variant edit takes 64"),
    Denoiser("klein", "flux2", "dev", {"guidance_embeds": False},
             "has guidance_embeds False; variant dev takes True"),
    Denoiser("inpaint", "sdxl", "base", {"in_channels": 9},
             "has in_channels 9; variant base takes 4\n  give --variant inpaint"),
    Denoiser("omni", "z_image", "base", {"siglip_feat_dim": 32},
             "has siglip_feat_dim 32; variant base takes none\n  give --variant omni"),
)  # fmt: skip
ORIGINAL = ("unknown", "Fill", "FLEX.2", "Fun-Control")
"""Those that are tried without config.json, too: their shapes tell."""


WIDE = {"num_attention_heads": 1, "attention_head_dim": 128}
"""Heads as published, from which the shapes tell a configuration."""


def model_with(
    folder: Path, case: Denoiser, entries: Mapping[str, Any]
) -> list[list[str]]:
    """The files of a toy whose denoiser has these entries."""
    family = load_family(case.family)
    sizes = {family.default_trainable: {**case.entries, **entries}}
    family.load("toy")(folder, case.variant, 0, sizes)
    groups: dict[Path, list[str]] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        groups.setdefault(path.parent, []).append(str(path))
    return list(groups.values())


def dataset(folder: Path, rows: int = 2) -> Path:
    """Two captioned images."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (rows, 64, 64, 3), np.uint8)
    for row, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{row}.png")
    lines = [f"{row}.png,a dog,{row}.png,{row}.png" for row in range(rows)]
    (folder / "metadata.csv").write_text(
        "\n".join(["image,prompt,edit_image,kontext_images", *lines])
    )
    return folder


def first_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("dstrain: error: ")]
    return errors[0] if errors else ""


@pytest.mark.parametrize(
    ("case", "has_config"),
    [(case, True) for case in DENOISERS]
    + [(case, False) for case in DENOISERS if case.name in ORIGINAL],
    ids=lambda value: value.name if isinstance(value, Denoiser) else str(value),
)
def test_a_denoiser_of_another_model_is_refused_by_what_it_is(
    case: Denoiser,
    has_config: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = {} if has_config else WIDE
    if case.family == "flux" and not has_config:
        entries = {**WIDE, "axes_dims_rope": [16, 56, 56]}
    model_files = model_with(tmp_path / "model", case, entries)
    if not has_config:
        (tmp_path / "model/transformer/config.json").unlink()
    words = ["--model", case.family, "--variant", case.variant]
    words += ["--model_paths", json.dumps(model_files), "--output_path", "out"]
    if case.family == "wan":
        # Nothing of the dataset is read in stage 2 of a cache that is absent, so that
        # inference tells.
        words = ["generate", *words[:-2], "--prompt", "a", "--output", "a.mp4"]
        words += ["--num_frames", "5", "--height", "32", "--width", "32"]
        if case.variant == "i2v":
            image = dataset(tmp_path / "data") / "0.png"
            words += ["--input", f"input_image={image}"]
        assert main(words) == 3
    else:
        words += ["--dataset_base_path", str(dataset(tmp_path / "data"))]
        assert main([*words, "--dry_run"]) == 3
        dry = first_line(capsys)
        assert main(words) == 3
        said = capsys.readouterr().err
        assert dry in said.splitlines()
        assert case.said in said
        return
    assert case.said in capsys.readouterr().err


@dataclass(frozen=True)
class Wrong:
    """A wrong command for a model and a dataset that are right but for `change`."""

    name: str
    exit: int
    flags: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """File -> its content, or a function of its tensors."""


def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(tensors.items())[1:])


def narrow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a weight narrower than the network's."""
    name = next(name for name, value in tensors.items() if value.ndim > 1)
    return {**tensors, name: tensors[name][:, :-1].contiguous()}


def other(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of no known component."""
    return {"nothing.known": torch.zeros(2)}


WRONG = (
    Wrong("no such LoRA target", 2, ("--lora_target_modules", "to_q,attention")),
    Wrong("a target that LoRA cannot wrap", 2, ("--lora_target_modules", "attn")),
    Wrong("no such component", 2, ("--lora_base_model", "unet")),
    Wrong("no such part", 2, ("--trainable_models", "dit.layers.0")),
    Wrong("no such task", 2, ("--task", "stf")),
    Wrong("no such variant", 2, ("--variant", "bsae")),
    Wrong("no such column", 2, ("--extra_inputs", "mask")),
    Wrong("a size that does not fit", 2, ("--height", "50", "--width", "64")),
    Wrong("video flags", 2, ("--num_frames", "5")),
    Wrong("an image that is none", 2, (), {"data/1.png": "no image"}),
    Wrong("an image of no bytes", 2, (), {"data/1.png": ""}),
    Wrong("a row of three cells", 2, (), {"data/metadata.csv": "image,prompt\n0.png,a,b\n"}),
    Wrong("no column image", 2, (), {"data/metadata.csv": "picture,prompt\n0.png,a\n"}),
    Wrong("no rows", 2, (), {"data/metadata.csv": "image,prompt\n"}),
    Wrong("a blank cell", 2, (), {"data/metadata.csv": "image,prompt\n0.png,a\n,b\n"}),
    Wrong("a tensor is missing", 3, (), {"model/vae/diffusion_pytorch_model.safetensors": cut}),
    Wrong("a tensor is narrow", 3, (), {"model/vae/diffusion_pytorch_model.safetensors": narrow}),
    Wrong("tensors of nothing known", 3, (), {"model/vae/diffusion_pytorch_model.safetensors": other}),
    Wrong("weights that are none", 3, (), {"model/vae/diffusion_pytorch_model.safetensors": "x" * 99}),
    Wrong("a configuration that is none", 3, (), {"model/transformer/config.json": "{"}),
    Wrong("another depth", 3, (), {"model/transformer/config.json": {"num_layers": 1}}),
    Wrong("another model's denoiser", 3, (), {"model/transformer/config.json": {"in_channels": 32}}),
    Wrong("a LoRA that is none", 3, ("--lora_checkpoint", "lora.safetensors"), {"lora.safetensors": "x" * 99}),
    Wrong("a preset that is none", 3, ("--preset_lora_path", "lora.safetensors"), {"lora.safetensors": "x" * 99}),
    Wrong("weights to start from that are none", 3, ("--resume_from_checkpoint", "lora.safetensors"),
          {"lora.safetensors": "x" * 99}),
    Wrong("someone's file in the output folder", 3, (), {"out/logs/loss.csv": "mine"}),
    Wrong("no feature cache's folder", 3, ("--task", "sft:train", "--feature_cache", "cache"),
          {"cache/store.json": "{}"}),
    Wrong("a preview that cannot be", 2, ("--preview_prompt", "a"), {"data/metadata.csv": "image,prompt\n1.png,a,b\n"}),
    Wrong("rank and full", 2, ("--trainable_models", "dit", "--lora_rank", "2")),
    Wrong("a learning rate", 2, ("--learning_rate", "-1")),
)  # fmt: skip


def apply(folder: Path, changes: Mapping[str, Any]) -> None:
    for name, content in changes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            save_file(content(load_file(path)), path)
        elif isinstance(content, dict) and path.exists():
            before = json.loads(path.read_text())
            path.write_text(json.dumps({**before, **content}))
        else:
            path.write_text(content)


def toy_project(folder: Path) -> list[str]:
    """Write a toy and a dataset; return the command for both from within the folder."""
    models = write_toy(load_family("qwen_image"), "base", folder / "model")
    dataset(folder / "data")
    words = ["--model", "qwen_image", "--variant", "base"]
    words += ["--dataset_base_path", "data"]
    return [*words, "--model_paths", json.dumps([model.path for model in models])]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_a_dry_run_refuses_what_the_run_refuses_in_the_same_words(
    case: Wrong,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = toy_project(tmp_path)
    apply(tmp_path, case.changes)
    words += ["--output_path", "out", *case.flags]
    codes, lines = [], []
    for more in (["--dry_run"], []):
        codes.append(main([*words, *more]))
        lines.append(first_line(capsys))
    assert codes == [case.exit, case.exit]
    assert lines[0] == lines[1] != ""


@dataclass(frozen=True)
class Long:
    """A prompt that is longer than a model takes."""

    family: str
    variant: str
    words: int
    """Words of the prompt, each of one token of the toy's tokenizer."""
    model: str
    """What takes fewer tokens."""
    limit: int
    usual: bool = False


LONG = (
    Long("flux", "dev", 600, "T5", 511),
    Long("flux", "dev", 200, "CLIP", 75, usual=True),
    Long("flux", "kontext", 600, "T5", 511),
    Long("wan", "t2v", 600, "umT5", 511),
    Long("wan", "i2v", 600, "umT5", 511),
    Long("qwen_image", "base", 4200, "Qwen-Image", 4094),
    Long("qwen_image", "edit", 4200, "Qwen-Image", 4094),
    Long("qwen_image", "edit-2509", 4200, "Qwen-Image", 4094),
    Long("sdxl", "base", 200, "CLIP", 75),
)
WAYS = ("unsplit", "split")


def film_data(folder: Path) -> None:
    noise = np.random.default_rng(0)
    as_mp4 = {"plugin": "pyav", "codec": "libx264", "out_pixel_format": "yuv420p"}
    for row in range(3):
        pixels = noise.integers(0, 256, (5, 32, 32, 3), np.uint8)
        imwrite(folder / f"{row}.mp4", pixels, fps=16, **as_mp4)


def long_project(folder: Path, case: Long) -> list[str]:
    """A dataset whose second and third row have the long prompt; returns a command."""
    data = dataset(folder / "data", 3)
    film_data(data)
    prompt = " ".join(["a"] * case.words) + " tail"
    lines = ["image,video,prompt,edit_image,kontext_images"]
    for row, text in enumerate(("a dog", prompt, prompt)):
        lines.append(f"{row}.png,{row}.mp4,{text},{row}.png,{row}.png")
    (data / "metadata.csv").write_text("\n".join(lines))
    return ["--model", case.family, "--variant", case.variant, "--toy", "--lora_rank", "2",
            "--dataset_base_path", str(data), *(("--num_frames", "5") if case.family == "wan" else ())]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", LONG, ids=lambda case: f"{case.variant} {case.model}")
def test_a_prompt_that_is_too_long_is_said_by_row_with_what_is_cut(
    case: Long,
    way: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = long_project(tmp_path, case)
    stage = {"unsplit": [], "split": ["--task", "sft:data_process", "--feature_cache", "cache"]}[way]  # fmt: skip
    output = [] if way == "split" else ["--output_path", "out", "--num_epochs", "1"]
    assert main([*words, *stage, *output]) == 0
    said = capsys.readouterr().err
    long = [line for line in said.splitlines() if f"but {case.model} takes" in line]
    assert f"but {case.model} takes {case.limit}; not seen: '" in said
    warnings = [line for line in long if line.startswith("dstrain: warning: ")]
    assert warnings == long
    assert warnings[-1].startswith("dstrain: warning: prompts of 2 rows are cut")
    assert "metadata.csv:3: prompt has " in warnings[-1]
    assert len(warnings) <= (2 if way == "unsplit" else 1)
    log = (tmp_path / ("cache" if way == "split" else "out/logs") / "dstrain.log").read_text()  # fmt: skip
    for row in ("metadata.csv:3", "metadata.csv:4"):
        lines = [line for line in log.splitlines() if f": {row}: prompt has" in line]
        assert any(line.endswith("tail'") for line in lines), row
    again = [*words, *stage, "--on_long_prompt", "error"]
    again += ["--output_path", "out2"] if way == "unsplit" else []
    assert main(again) == (0 if case.usual else 2)
    if not case.usual:
        error = capsys.readouterr().err.splitlines()
        starts = [f"dstrain: error: metadata.csv:{row}: prompt: has " for row in (3, 4)]
        assert any(line.startswith(tuple(starts)) for line in error)  # fmt: skip


def test_with_error_nothing_of_a_long_prompt_is_stored_and_stage_2_refuses_what_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = long_project(tmp_path, LONG[0])
    first = [*words, "--task", "sft:data_process", "--feature_cache", "cache"]
    second = [*words, "--task", "sft:train", "--feature_cache", "cache"]
    second += ["--output_path", "out", "--max_steps", "1"]
    strict = ["--on_long_prompt", "error"]
    assert main([*first, *strict]) == 2
    record = (tmp_path / "cache/long_prompts-0.jsonl").read_text()
    assert "CLIP" in record and "T5" not in record
    assert main([*second, *strict]) == 3
    assert main(first) == 0
    capsys.readouterr()
    assert main([*second, *strict]) == 2
    assert "dstrain: error: metadata.csv:3: prompt: has 6" in capsys.readouterr().err
    assert main(second) == 0


@pytest.mark.parametrize(
    "case", [LONG[0], LONG[3], LONG[5]], ids=lambda case: case.family
)
def test_generation_says_what_it_cuts_or_refuses(
    case: Long, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = " ".join(["a"] * case.words) + " tail"
    name = "a.mp4" if case.family == "wan" else "a.png"
    words = ["generate", "--model", case.family, "--variant", case.variant, "--toy"]
    words += ["--prompt", prompt, "--output", str(tmp_path / name), "--height", "32"]
    words += ["--width", "32", "--num_inference_steps", "1", "--guidance_scale", "1"]
    words += ["--num_frames", "5"] if case.family == "wan" else []
    assert main([*words, "--on_long_prompt", "error"]) == 2
    assert f"but {case.model} takes" in capsys.readouterr().err
    assert not (tmp_path / name).exists()
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "dstrain: warning: --prompt: prompt has " in said and "tail'" in said


STILLS = ("unsplit", "data_process", "dry_run")


@pytest.mark.parametrize("way", STILLS)
def test_a_row_of_which_every_frame_is_held_is_refused_before_loading(
    way: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = dataset(tmp_path / "data", 3)
    film_data(data)
    lines = ["video,prompt", "0.mp4,a", "still.mp4,b", "1.mp4,c"]
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    imwrite(data / "still.mp4", pixels, fps=24, plugin="pyav", codec="libx264")
    (data / "metadata.csv").write_text("\n".join(lines))
    words = ["--model", "wan", "--variant", "ti2v-5b", "--toy", "--num_frames", "5"]
    words += ["--extra_inputs", "input_image", "--dataset_base_path", "data"]
    flags = {"unsplit": ["--output_path", "out"], "dry_run": ["--dry_run"],
             "data_process": ["--task", "sft:data_process", "--feature_cache", "cache"]}  # fmt: skip
    monkeypatch.setattr("dstrain.pipeline.pipeline.Pipeline.from_found", None)
    assert main([*words, *flags[way]]) == 2
    said = capsys.readouterr().err
    assert "metadata.csv:3:video: gives 1 frame, which is input_image" in said


def with_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for value in tensors.values():
        if value.ndim > 1:
            value.view(-1)[0] = float("nan")
    return tensors


@pytest.mark.parametrize("part", ["vae", "text_encoder", "transformer"])
def test_nan_in_weights_is_named_and_not_stored(
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = toy_project(tmp_path)
    for path in sorted((tmp_path / "model" / part).glob("*.safetensors")):
        save_file(with_nan(load_file(path)), path)
    stage_1 = [*words, "--task", "sft:data_process", "--feature_cache", "cache"]
    name = "dit" if part == "transformer" else part
    if name != "dit":
        assert main(stage_1) == 2
        said = capsys.readouterr().err
        assert "dstrain: error: metadata.csv:2: unit encode_" in said
        assert "contains NaN; it is not stored" in said
        assert f"the weights of {name} in " in said
    assert main([*words, "--output_path", "out"]) == 3
    said = capsys.readouterr().err
    assert f"the weights of {name} in " in said and "contain NaN or infinity" in said
