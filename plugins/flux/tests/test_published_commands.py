"""DiffSynth-Studio's commands for FLUX mean their model as they are, and --model_id means
what they write out.
"""

from dataclasses import replace

import pytest
from dstrain.cli.main import main
from dstrain_flux import MODEL

from tests.support.published_commands import (
    MODELS,
    assert_means,
    long_form,
    published_commands,
    short_form,
)

COMMANDS = {one.name: one for one in published_commands() if one.family == "flux"}
OWNER = "black-forest-labs"
DEV = f"{OWNER}/FLUX.1-dev:flux1-dev.safetensors"
SHARED = [
    f"{OWNER}/FLUX.1-dev:text_encoder/model.safetensors",
    f"{OWNER}/FLUX.1-dev:text_encoder_2/*.safetensors",
    f"{OWNER}/FLUX.1-dev:ae.safetensors",
]
CONTROLNET = "diffusion_pytorch_model.safetensors"
IP_ADAPTER = "InstantX/FLUX.1-dev-IP-Adapter"
SIGLIP = "google/siglip-so400m-patch14-384:model.safetensors"
# What the table of commands lacks: model files, a further input, and what is meant.
OTHERS = [
    ([f"{OWNER}/FLUX.1-schnell:flux1-schnell.safetensors"], "", "schnell dit"),
    (
        [DEV, f"{IP_ADAPTER}:ip-adapter.bin", SIGLIP],
        "ipadapter_images",
        "ip-adapter dit",
    ),
]
REFUSED = [
    ("DiffSynth-Studio/LoRA-Encoder-FLUX.1-Dev:model.safetensors", "LoRA-Encoder"),
    ("DiffSynth-Studio/Nexus-GenV2:model*.safetensors", "Nexus-Gen"),
]


pytestmark = pytest.mark.usefixtures("empty")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_means_a_variant_or_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_means(COMMANDS[name], main, capsys)


@pytest.mark.parametrize(("files", "extra", "means"), OTHERS)
def test_other_files_and_inputs_mean_other_variants(
    files: list[str], extra: str, means: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {MODELS: ",".join([*files, *SHARED])}
    if extra:
        changes |= {"--extra_inputs": extra, "--data_file_keys": f"image,{extra}"}
    command = COMMANDS["FLUX.1-Krea-dev_lora"].changed(changes)
    assert_means(replace(command, means=means), main, capsys)


@pytest.mark.parametrize(("file", "model"), REFUSED)
def test_a_file_of_another_model_is_refused_by_its_name(
    file: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ",".join([DEV, *SHARED, file])
    command = COMMANDS["FLUX.1-Krea-dev_lora"].changed({MODELS: files})
    assert_means(replace(command, unsupported=model), main, capsys)


@pytest.mark.parametrize("name", ["dev", "Krea-dev", "Kontext-dev"])
def test_an_id_is_the_files_of_the_published_command(name: str) -> None:
    model_id = f"{OWNER}/FLUX.1-{name}"
    files = [f"{model_id}:flux1-{name.lower()}.safetensors", *SHARED]
    assert short_form(MODEL, model_id) == long_form(MODEL, " ".join(files))


@pytest.mark.parametrize(
    ("model_id", "files"),
    [
        ("InstantX/FLUX.1-dev-Controlnet-Union-alpha", f"{{}}:{CONTROLNET}"),
        ("jasperai/Flux.1-dev-Controlnet-Upscaler", f"{{}}:{CONTROLNET}"),
        (
            f"{OWNER}/FLUX.1-Redux-dev",
            "{0}:image_encoder/model.safetensors {0}:image_embedder/" + CONTROLNET,
        ),
        (IP_ADAPTER, f"{{}}:ip-adapter.bin {SIGLIP}"),
    ],
)
def test_an_id_of_an_adapter_is_its_files_and_those_of_dev(
    model_id: str, files: str
) -> None:
    short = short_form(MODEL, model_id)
    long = long_form(MODEL, " ".join([DEV, *SHARED, files.format(model_id)]))
    assert sorted(map(str, short)) == sorted(map(str, long))


def test_schnell_needs_no_file_whose_terms_must_be_accepted() -> None:
    model_id = f"{OWNER}/FLUX.1-schnell"
    assert {one.model_id for one in short_form(MODEL, model_id)} == {model_id}
