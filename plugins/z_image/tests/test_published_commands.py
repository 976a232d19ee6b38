"""DiffSynth-Studio's commands for Z-Image mean their model as they are, and --model_id
means what they write out.
"""

import pytest
from dstrain.cli.main import main
from dstrain_z_image import MODEL

from tests.support.published_commands import (
    assert_means,
    long_form,
    published_commands,
    short_form,
)

COMMANDS = {
    f"{number}-{one.name}": one
    for number, one in enumerate(published_commands())
    if one.family == "z_image"
}
TURBO = "Tongyi-MAI/Z-Image-Turbo"
TRANSFORMER = "transformer/*.safetensors"
SHARED = f"{TURBO}:text_encoder/*.safetensors {TURBO}:vae/diffusion_pytorch_model.safetensors"
OMNI = "Tongyi-MAI/Z-Image-Omni-Base"
CONTROLNET = "PAI/Z-Image-Turbo-Fun-Controlnet-Union-2.1"

pytestmark = pytest.mark.usefixtures("empty")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_means_a_variant(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_means(COMMANDS[name], main, capsys)


@pytest.mark.parametrize(
    ("model_id", "files"),
    [
        ("Tongyi-MAI/Z-Image", f"Tongyi-MAI/Z-Image:{TRANSFORMER}"),
        (TURBO, f"{TURBO}:{TRANSFORMER}"),
        (OMNI, f"{OMNI}:{TRANSFORMER} {OMNI}:siglip/model.safetensors"),
        (
            CONTROLNET,
            f"{CONTROLNET}:Z-Image-Turbo-Fun-Controlnet-Union-2.1-8steps.safetensors {TURBO}:{TRANSFORMER}",
        ),
    ],
)
def test_an_id_is_the_files_of_the_published_command(model_id: str, files: str) -> None:
    short = short_form(MODEL, model_id)
    long = long_form(MODEL, f"{files} {SHARED}")
    assert sorted(map(str, short)) == sorted(map(str, long))


def test_a_flag_that_changes_nothing_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (command,) = (
        one for one in COMMANDS.values() if "--enable_npu_patch" in one.values
    )
    assert_means(command, main, capsys)
    assert main(["graph", *command.argv()]) == 0
    assert "--enable_npu_patch has no effect" in capsys.readouterr().err
