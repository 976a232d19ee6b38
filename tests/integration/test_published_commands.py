"""Half of the commands that DiffSynth-Studio publishes for these families: each of a model that
is supported trains as it is, with toys in place of the models; that the others are refused by
name, each family tests.
"""

import re
from pathlib import Path

import pytest
import torch
from dstrain.cli.main import main
from dstrain.registry import load_family
from safetensors.torch import load_file

from tests.support import everyday
from tests.support.published_commands import (
    StandIns,
    make_data,
    published_commands,
    train,
    write_header,
)
from tests.support.toys import opened

COMMANDS = {
    f"{number}-{one.name}": one for number, one in enumerate(published_commands())
}
EVERYDAY = (
    "Qwen-Image-LoRA-splited",
    "FLUX.1-Krea-dev_lora",
    "FLUX.2-klein-base-4B_lora",
    "Wan2.2-T2V-A14B_high_noise_full",
    "Z-Image-Turbo-Fun-Controlnet-Union-2.1-8steps_full",
)
"""Those that the ordinary suite trains: one of each family."""
INPUTS = {
    "wan": {"animate_pose_video": "Wan2.2-Animate", "animate2_pose_video": "Wan2.2-Animate-2",
            "s2v_pose_video": "Wan2.2-S2V", "input_audio": "Wan2.2-S2V", "longcat_video": "LongCat-Video",
            "wantodance_music": "Wan-Dancer", "vap_video": "Video-As-Prompt"},
    "flux": {"flex_inpaint_image": "Flex.2-preview", "value_controller_inputs": "AttriCtrl",
             "infinityou_id_image": "InfiniteYou", "insert_anything_image": "Insert Anything",
             "lora_encoder_inputs": "LoRA-Encoder", "nexus_gen_image": "Nexus-Gen", "step1x_image": "Step1X-Edit"},
    "flux2": {"template_inputs": "Template"},
}  # fmt: skip
"""Family -> an input that only a model that is refused has -> the model."""
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not counted: videos of published sizes take seconds."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("is not counted")

    monkeypatch.setattr("dstrain_planner.memory.counting.count_activations", refuse)


CASES = everyday.cases(
    [name for name, one in COMMANDS.items() if not one.unsupported],
    lambda name: COMMANDS[name].name in EVERYDAY,
)


@pytest.mark.parametrize("family", INPUTS)
def test_an_input_of_another_model_tells_it_without_its_id(family: str) -> None:
    record = load_family(family)
    assert {one: record.unsupported([one]) for one in INPUTS[family]} == INPUTS[family]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("name", CASES)
def test_each_command_of_a_supported_model_trains_what_it_names(
    name: str, empty: Path
) -> None:
    small = {"--edit_pixels": "1024", "--edit_text_pixels": "3136"}
    variant, _, trained = COMMANDS[name].means.partition(" ")
    is_edit = "Edit" in name and variant != "base"
    command = COMMANDS[name].changed(small if is_edit else {})
    write_header(command, Path())
    assert main(command.argv("--dry_run")) == 0
    folder = command.toy(variant)
    family = load_family(command.family)
    stand_ins = StandIns(family, variant, empty, folder, command.folders)
    if command.values.get("--task") != "sft:train":
        make_data(command, variant, empty)
    stand_ins.write(command.origins)
    with stand_ins.configured():
        assert train(command, variant, folder, main) == 0
    if command.values.get("--task") == "sft:data_process":
        return
    (saved,) = Path(command.values["--output_path"]).glob("*.safetensors")
    after = load_file(saved)
    if "--trainable_models" not in command.values:
        ups = [one for key, one in after.items() if re.search("lora_(B|up)", key)]
        assert any(one.any() for one in ups)
        return
    before = opened(command.family, variant).components[trained].state_dict()
    is_own = before.keys() == after.keys()
    assert not is_own or any(
        not torch.equal(one, after[key]) for key, one in before.items()
    )
