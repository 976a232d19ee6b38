"""--model_id means what DiffSynth-Studio's commands write out; a local toy is told, too."""

from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain_qwen_image import MODEL
from dstrain_qwen_image.toy import write

from tests.support import everyday
from tests.support.short_forms import long_form, short_form

TRANSFORMER = "transformer/diffusion_pytorch_model*.safetensors"
SHARED = """Qwen/Qwen-Image:text_encoder/model*.safetensors
    Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"""


@pytest.mark.parametrize(
    ("model_id", "pattern"),
    [
        ("Qwen/Qwen-Image", TRANSFORMER),
        ("Qwen/Qwen-Image-2512", TRANSFORMER),
        ("Qwen/Qwen-Image-Edit-2509", TRANSFORMER),
        ("Qwen/Qwen-Image-Edit-2511", TRANSFORMER),
        (
            "DiffSynth-Studio/Qwen-Image-Distill-Full",
            "diffusion_pytorch_model*.safetensors",
        ),
        ("FireRedTeam/FireRed-Image-Edit-1.0", TRANSFORMER),
        ("FireRedTeam/FireRed-Image-Edit-1.1", TRANSFORMER),
    ],
)
def test_an_id_is_the_files_of_the_published_command(
    model_id: str, pattern: str
) -> None:
    long = long_form(MODEL, f"{model_id}:{pattern} {SHARED}")
    assert short_form(MODEL, model_id) == long


@pytest.mark.parametrize(
    "variant", everyday.cases(MODEL.variants, lambda name: name == "base")
)
def test_a_toy_is_named_by_its_folder(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "toy", variant)
    words = ["graph", "--model_id", str(tmp_path / "toy"), "--variant", variant]
    assert main([*words, "--tokenizer_path", "elsewhere"]) == 0
    assert f"qwen_image {variant}, task sft" in capsys.readouterr().out
