"""--model_id means what DiffSynth-Studio's commands write out; a local toy is told, too."""

from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain_flux import MODEL
from dstrain_flux.toy import write

from tests.support import everyday
from tests.support.short_forms import long_form, short_form

CONTROLNET = "diffusion_pytorch_model.safetensors"
OWNER = "black-forest-labs"
SHARED = f"""{OWNER}/FLUX.1-dev:text_encoder/model.safetensors
    {OWNER}/FLUX.1-dev:text_encoder_2/*.safetensors {OWNER}/FLUX.1-dev:ae.safetensors"""


@pytest.mark.parametrize("name", ["dev", "Krea-dev", "Kontext-dev"])
def test_an_id_is_the_files_of_the_published_command(name: str) -> None:
    model_id = f"{OWNER}/FLUX.1-{name}"
    file = f"flux1-{name.lower()}.safetensors"
    long = long_form(MODEL, f"{model_id}:{file} {SHARED}")
    assert short_form(MODEL, model_id) == long


@pytest.mark.parametrize(
    ("model_id", "files"),
    [
        ("InstantX/FLUX.1-dev-Controlnet-Union-alpha", f"{{}}:{CONTROLNET}"),
        ("jasperai/Flux.1-dev-Controlnet-Upscaler", f"{{}}:{CONTROLNET}"),
        (
            f"{OWNER}/FLUX.1-Redux-dev",
            "{0}:image_encoder/model.safetensors {0}:image_embedder/" + CONTROLNET,
        ),
        (
            "InstantX/FLUX.1-dev-IP-Adapter",
            "{}:ip-adapter.bin google/siglip-so400m-patch14-384:model.safetensors",
        ),
    ],
)
def test_an_id_of_an_adapter_is_its_files_and_those_of_dev(
    model_id: str, files: str
) -> None:
    dev = f"{OWNER}/FLUX.1-dev:flux1-dev.safetensors"
    short = short_form(MODEL, model_id)
    long = long_form(MODEL, f"{dev} {SHARED} {files.format(model_id)}")
    assert sorted(map(str, short)) == sorted(map(str, long))


def test_schnell_needs_no_file_whose_terms_must_be_accepted() -> None:
    model_id = f"{OWNER}/FLUX.1-schnell"
    assert {one.model_id for one in short_form(MODEL, model_id)} == {model_id}


@pytest.mark.parametrize(
    "variant", everyday.cases(MODEL.variants, lambda name: name == "controlnet-union")
)
def test_a_toy_is_named_by_its_folder(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "toy", variant)
    words = ["graph", "--model_id", str(tmp_path / "toy"), "--variant", variant]
    assert main([*words, "--tokenizer_1_path", "elsewhere"]) == 0
    assert f"flux {variant}, task sft" in capsys.readouterr().out
