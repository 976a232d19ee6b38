"""R7: what a model cannot do is named: denoisers of other models, and every wrong input
alike by `--dry_run` and by the run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain.cli.main import main
from dstrain.models.toy import write_toy
from dstrain.registry.discovery import load_family
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
             "is FLUX.1-Fill-dev, which no variant of flux is for: it has 384 input channels; variant dev takes 64"),
    Denoiser("FLEX.2", "flux", "dev", {"in_channels": 196, "out_channels": 64},
             "is Flex.2-preview, which no variant of flux is for: it has 196 input channels; variant dev takes 64"),
    Denoiser("Canny", "flux", "kontext", {"in_channels": 128, "out_channels": 64},
             "is FLUX.1-Canny-dev or FLUX.1-Depth-dev, which no variant of flux is for"),
    Denoiser("unknown", "flux", "dev", {"in_channels": 80, "out_channels": 64},
             "has 80 input channels; variant dev takes 64"),
    Denoiser("LongCat", "wan", "t2v", {"num_attention_heads": 32, "num_layers": 48},
             "is LongCat-Video, which no variant of wan is for"),
    Denoiser("FLF2V", "wan", "i2v", {"pos_embed_seq_len": 514},
             "is Wan2.1-FLF2V, which no variant of wan is for"),
    Denoiser("Fun-Control", "wan", "ti2v-5b", {"in_channels": 48, "out_channels": 16},
             "is Wan2.1-Fun-Control, which no variant of wan is for: it has 16 output channels"),
    Denoiser("another variant", "wan", "t2v", {"in_channels": 36},
             "has 36 input channels; variant t2v takes 16\n  give --variant i2v-a14b"),
    Denoiser("Layered", "qwen_image", "base", {"use_layer3d_rope": True},
             "is Qwen-Image-Layered, which no variant of qwen_image is for: it has use_layer3d_rope"),
    Denoiser("unknown channels", "qwen_image", "edit", {"in_channels": 32},
             "has 32 input channels; variant edit takes 64"),
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
    sizes = {"dit": {**case.entries, **entries}}
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
    """The first line of the error."""
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
    """Leave one tensor out."""
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
    """Change files of a project."""
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


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_a_dry_run_refuses_what_the_run_refuses_in_the_same_words(
    case: Wrong,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    family = load_family("qwen_image")
    models = write_toy(family, "base", tmp_path / "model")
    dataset(tmp_path / "data")
    apply(tmp_path, case.changes)
    words = [
        "--model",
        "qwen_image",
        "--variant",
        "base",
        "--dataset_base_path",
        "data",
    ]
    words += ["--model_paths", json.dumps([model.path for model in models])]
    words += ["--output_path", "out", *case.flags]
    codes, lines = [], []
    for more in (["--dry_run"], []):
        codes.append(main([*words, *more]))
        lines.append(first_line(capsys))
    assert codes == [case.exit, case.exit]
    assert lines[0] == lines[1] != ""
