"""DiffSynth-Studio's commands for FLUX.2 mean their model as they are, and --model_id means
what they write out.
"""

import pytest
from dstrain.cli.main import main
from dstrain_flux2 import MODEL

from tests.support.published_commands import (
    assert_means,
    long_form,
    published_commands,
    short_form,
)

COMMANDS = {
    f"{number}-{one.name}": one
    for number, one in enumerate(published_commands())
    if one.family == "flux2"
}
OWNER = "black-forest-labs"

pytestmark = pytest.mark.usefixtures("empty")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_means_a_variant(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_means(COMMANDS[name], main, capsys)


@pytest.mark.parametrize(
    ("name", "encoders"),
    [
        *((name, name) for name in ("dev", "klein-4B", "klein-9B")),
        ("klein-base-4B", "klein-4B"),
        ("klein-base-9B", "klein-9B"),
    ],
)
def test_an_id_is_the_files_of_the_published_command(name: str, encoders: str) -> None:
    model_id, other = f"{OWNER}/FLUX.2-{name}", f"{OWNER}/FLUX.2-{encoders}"
    files = f"{model_id}:transformer/*.safetensors {other}:text_encoder/*.safetensors"
    files += f" {other}:vae/diffusion_pytorch_model.safetensors"
    assert short_form(MODEL, model_id) == long_form(MODEL, files)


def test_templates_are_refused_by_their_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their commands are on the family's page."""
    (command,) = (
        one for one in COMMANDS.values() if one.name == "FLUX.2-klein-base-9B_full"
    )
    template = {
        "--extra_inputs": "template_inputs",
        "--trainable_models": "template_model",
    }
    assert main(["graph", *command.changed(template).argv()]) == 2
    assert "Template" in capsys.readouterr().err
