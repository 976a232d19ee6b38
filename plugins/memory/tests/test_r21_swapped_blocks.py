"""Where weights lie changes no number: a run whose blocks are swapped, or whose encoders
lie in RAM, leaves what one leaves that has everything on its device, bit for bit, with
poisoned memory.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig, run
from dstrain.runs.resolve import resolve
from dstrain.testing.rows import usual_size, write_rows

from tests.support.family import weights_of
from tests.support.poisoned_memory import poisoned_memory
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, same, warm_project

pytestmark = pytest.mark.promise(
    "R21", "swapped blocks and offloaded models: same bits"
)


@dataclass(frozen=True)
class Toy:
    family: str
    variant: str
    trained: str
    encoders: str
    """Components that lie in RAM beside it, in half of the runs."""

    def __str__(self) -> str:
        return f"{self.family} {self.variant} {self.trained}"


# The ordinary suite runs every tenth case: one toy of each family.
TOYS = (
    Toy("qwen_image", "base", "dit", "text_encoder,vae"),
    Toy("qwen_image", "edit-2511", "text_encoder", "vae"),
    Toy("wan", "t2v", "dit", "text_encoder"),
    Toy("wan", "i2v-a14b", "dit2", "text_encoder,vae"),
    Toy("flux", "dev", "dit", "text_encoder_1,text_encoder_2,vae"),
    Toy("flux2", "dev", "dit", "text_encoder,vae"),
    Toy("sdxl", "base", "unet", "text_encoder,text_encoder_2,vae"),
    Toy("z_image", "omni", "dit", "text_encoder,vae"),
    Toy("flux", "kontext", "text_encoder_2", "vae,text_encoder_1"),
)
METHODS = ("fp8", "int8_block", "bitsandbytes_nf4")
"""How the weights of the trained component may be stored."""
SWAPS: tuple[dict[str, Any], ...] = (
    {"blocks_to_swap": 1},
    {"enable_model_cpu_offload": True},
)
WAYS = [(None, swap, is_split) for swap in SWAPS for is_split in (False, True)]
WAYS += [
    (method, swap, is_split)
    for method in METHODS
    for swap, is_split in zip(SWAPS, (True, False), strict=True)
]
CASES = [(toy, *way) for way in WAYS for toy in TOYS]


def flags(toy: Toy, method: str | None, folder: Path) -> dict[str, Any]:
    spec = resolve(TrainConfig(model=toy.family, variant=toy.variant, toy=True)).spec
    size = usual_size(spec)
    data = folder / "data"
    if not data.exists():
        write_rows(spec, data)
    return {
        "model": toy.family,
        "variant": toy.variant,
        "toy": True,
        "dataset_base_path": data,
        "lora_base_model": toy.trained,
        "lora_rank": 2,
        "learning_rate": 1e-3,
        "height": size.height,
        "width": size.width,
        "max_steps": 2,
        "mixed_precision": "no",
        "quant_options": f"{toy.trained}:{method}" if method else None,
        **({"num_frames": size.frames} if spec.reads_videos else {}),
    }


@pytest.fixture(scope="module")
def without(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Toy, str | None], Path]:
    """Return a function: toy, method -> the output of a run with all on the device."""
    made: dict[tuple[Toy, str | None], Path] = {}

    def output(toy: Toy, method: str | None) -> Path:
        if (toy, method) not in made:
            folder = tmp_path_factory.mktemp("without")
            given = flags(toy, method, folder)
            run(TrainConfig(**given, output_path=folder / "out"))
            made[toy, method] = folder / "out"
        return made[toy, method]

    return output


@pytest.mark.parametrize(("toy", "method", "swap", "is_split"), CASES, ids=str)
def test_where_weights_lie_changes_no_number(
    toy: Toy,
    method: str | None,
    swap: dict[str, Any],
    is_split: bool,
    tmp_path: Path,
    without: Callable[[Toy, str | None], Path],
) -> None:
    want = without(toy, method)
    given = flags(toy, method, tmp_path) | swap
    given["dataset_base_path"] = want.parent / "data"
    given["offload_models"] = toy.encoders
    output = tmp_path / "out"
    with poisoned_memory() as seen:
        if is_split:
            cache = tmp_path / "cache"
            given["feature_cache"] = cache
            run(TrainConfig(**given, task="sft:data_process"))
            assert seen.loads > 0  # the encoders
            given["task"] = "sft:train"
            del given["dataset_base_path"]
        before = seen.loads
        run(TrainConfig(**given, output_path=output))
        assert seen.loads > before
        assert seen.now == 0
    assert log(output) == log(want)
    assert same(files(output), files(want))


@pytest.mark.parametrize("swap", SWAPS, ids=str)
def test_processes_that_swap_train_together_what_others_do(
    swap: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    here = warm_project(tmp_path / "project")
    given: dict[str, Any] = {
        "model": "tiny",
        "dataset_base_path": here / "data",
        "learning_rate": 1e-2,
        "lora_rank": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 2,
        "model_paths": json.dumps(list(weights_of(here / "model").values())),
    }
    outputs = []
    for number, way in enumerate(({}, swap)):
        outputs.append(tmp_path / str(number))
        line = words({**given, **way, "output_path": outputs[-1]})
        ended = in_processes(2, commands(line), tmp_path)
        assert ended.codes == (0, 0), ended.said
    assert log(outputs[0]) == log(outputs[1])
    assert same(files(outputs[0]), files(outputs[1]))
