"""Half of the commands that DiffSynth-Studio publishes for these families: each of a model that
is supported trains as it is, with toys in place of the models; the others are refused by name.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain.registry import load_family

from tests.support.published_commands import (
    RESOLVED,
    Published,
    StandIns,
    make_data,
    published_commands,
    train,
    write_header,
)

COMMANDS = published_commands()
EVERYDAY = (
    "Qwen-Image-LoRA-splited",
    "FLUX.1-Krea-dev_lora",
    "Wan2.2-T2V-A14B_high_noise_full",
)
"""Those that the ordinary suite trains: one of each family."""
NOT_SUPPORTED = {
    "LongCat-Video", "Animate", "S2V", "Dancer", "Video-As-Prompt", "AttriCtrl", "InfiniteYou", "Step1X-Edit",
    "Nexus-Gen", "FLEX.2", "Insert-Anything", "LoRA-Encoder",
}  # fmt: skip
"""Parts of the names of models that are refused."""
INPUTS = {
    "wan": {"animate_pose_video": "Wan2.2-Animate", "animate2_pose_video": "Wan2.2-Animate-2",
            "s2v_pose_video": "Wan2.2-S2V", "input_audio": "Wan2.2-S2V", "longcat_video": "LongCat-Video",
            "wantodance_music": "Wan-Dancer", "vap_video": "Video-As-Prompt"},
    "flux": {"flex_inpaint_image": "Flex.2-preview", "value_controller_inputs": "AttriCtrl",
             "infinityou_id_image": "InfiniteYou", "insert_anything_image": "Insert Anything",
             "lora_encoder_inputs": "LoRA-Encoder", "nexus_gen_image": "Nexus-Gen", "step1x_image": "Step1X-Edit"},
}  # fmt: skip
"""Family -> an input that only a model that is refused has -> the model."""
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Toys = Callable[[str, str], Path]


def is_supported(command: Published) -> bool:
    """Whether a command's model is one that dstrain trains."""
    place = command.name + command.values["--model_id_with_origin_paths"]
    return not any(name.lower() in place.lower() for name in NOT_SUPPORTED)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Return a family's toy of a variant, written once."""
    folder = tmp_path_factory.mktemp("toys")

    def toy(family: str, variant: str) -> Path:
        path = folder / family / variant
        if not path.exists():
            load_family(family).load("toy")(path, variant, 0)
        return path

    return toy


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not counted: videos of published sizes take seconds."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("is not counted")

    monkeypatch.setattr("dstrain_planner.memory.counting.count_activations", refuse)


def resolved(command: Published, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and the variant of a dry run; for a refusal, what it says."""
    write_header(command, Path())
    code = main(command.argv("--dry_run"))
    said = capsys.readouterr()
    if code:
        return code, said.err
    found = RESOLVED.search(said.out)
    assert found is not None, said.out
    return code, found.group(2)


def cases(*, supported: bool) -> list[object]:
    """Return the commands of supported models, or the others; all supported but one per
    family are for `make everything`.
    """
    return [
        pytest.param(
            one,
            id=f"{i}-{one.name}",
            marks=pytest.mark.drawn if supported and one.name not in EVERYDAY else (),
        )
        for i, one in enumerate(COMMANDS)
        if is_supported(one) == supported
    ]


@pytest.mark.parametrize("family", INPUTS)
def test_an_input_of_another_model_tells_it_without_its_id(family: str) -> None:
    record = load_family(family)
    assert {one: record.unsupported([one]) for one in INPUTS[family]} == INPUTS[family]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("command", cases(supported=False))
def test_each_command_of_another_model_is_refused_by_its_name(
    command: Published,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = resolved(command, capsys)
    assert (code, "not supported yet" in said) == (2, True), said


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("command", cases(supported=True))
def test_each_command_of_a_supported_model_trains_to_the_end(
    command: Published,
    toys: Toys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, variant = resolved(command, capsys)
    assert code == 0, variant
    toy = toys(command.family, variant)
    stand_ins = StandIns(load_family(command.family), variant, tmp_path, toy)
    if command.values.get("--task") != "sft:train":
        make_data(command, variant, tmp_path)
    stand_ins.write(command.origins)
    with stand_ins.configured():
        assert train(command, variant, toy, main) == 0
    if command.values.get("--task") != "sft:data_process":
        assert list(Path(command.values["--output_path"]).glob("*.safetensors"))
