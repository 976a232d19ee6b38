"""A configuration is written as data without secrets, and as the command that is typed."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, StateError, TrainConfig, run
from dstrain.cli.main import main
from dstrain.config import (
    CONFIG as PLACE,
    command_line,
    read_resolved,
    with_run_options,
    write_resolved,
)

from tests.support.command_lines import toy_config
from tests.support.runs import config as config_of, project

CONFIG = toy_config(
    column=("a=b", "c=d"),
    resume="auto",
    family_options={"area": "64"},
    disabled_plugins=("plugin-other",),
)
CHOSEN: dict[str, Any] = {
    "model_id": "a/b", "hub": "modelscope", "mixed_precision": "no",
    "family_options": {"area": "64", "bare": "True"},
}  # fmt: skip
"""What a run used of what generation uses, too."""


def test_what_a_run_used_is_what_generation_takes(tmp_path: Path) -> None:
    config = TrainConfig(model="m", **CHOSEN)
    (tmp_path / PLACE).parent.mkdir()
    write_resolved(tmp_path / PLACE, config, {})
    wanted = GenerateConfig(run=tmp_path, prompt="a", output=Path("a.png"))
    found = with_run_options(wanted)
    assert (found.model, found.seed) == ("m", 0)
    given: dict[str, Any]
    for given, left in (
        ({}, {}),
        ({"mixed_precision": "bf16"}, {}),
        ({"toy": True}, {"model_id": None, "hub": None}),
        ({"model_paths": '["a"]'}, {"model_id": None, "hub": None}),
        ({"family_options": {"area": "32"}}, {}),
    ):
        found = with_run_options(replace(wanted, **given))
        options = {**CHOSEN["family_options"], **given.get("family_options", {})}
        expected = {**CHOSEN, **left, **given, "family_options": options}
        assert {name: getattr(found, name) for name in expected} == expected
    for text in ("{", "[]", "{}"):
        (tmp_path / PLACE).write_text(text)
        with pytest.raises(StateError, match=PLACE):
            read_resolved(tmp_path)


def test_secrets_are_not_written_and_paths_need_not_be_text(tmp_path: Path) -> None:
    path = Path("https://user:password1@host/x")
    config = toy_config(dataset_metadata_path=path, output_path=Path("d\udcff"))
    write_resolved(tmp_path / "a.json", config, {})
    written = (tmp_path / "a.json").read_bytes()
    assert b"password1" not in written
    assert json.loads(written)["output_path"] == "d\udcff"


def test_a_command_line_gives_the_configuration_back(
    runs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = toy_config(
        max_steps=1,
        resume="auto",
        overwrite=False,
        use_gradient_checkpointing=True,
        column=("a=-a 'dog'", "b=two words"),
        learning_rate=1e-5,
        task="sft:train",
        optimizer_args=("a=1", "b=2"),
    )
    changed = {"task": "sft", "use_gradient_checkpointing": False, "resume": None}
    for changes in ({}, changed, {"use_gradient_checkpointing": None}):
        words = shlex.split(command_line(given, **changes))
        assert words[:3] == ["dstrain", "--model", "faky"]
        assert main(words[1:]) == 0
        assert command_line(runs.pop()) == shlex.join(words)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launched = shlex.split(command_line(given))
    assert launched[:5] == ["torchrun", "--nproc_per_node", "2", "-m", "dstrain"]
    assert command_line(given, task="sft:data_process").startswith("dstrain ")


@pytest.mark.usefixtures("tiny")
def test_stage_2_names_the_command_that_fills_its_cache_where_the_dataset_is_known(
    tmp_path: Path,
) -> None:
    stage_2 = {"task": "sft:train", "max_steps": 1, "overwrite": True}
    cache = tmp_path / "cache"
    given = config_of(project(tmp_path), feature_cache=cache, **stage_2)
    for base, store in ((None, cache), (cache, None)):
        with pytest.raises(StateError) as caught:
            run(replace(given, dataset_base_path=base, feature_cache=store))
        assert ", with --task sft:data_process" in caught.value.help_lines[-1]
    with pytest.raises(StateError) as caught:
        run(given)
    (note,) = caught.value.__notes__  # without the flags of the commands
    assert "feature_cache=" in note and "task=" not in note
    filling = shlex.split(caught.value.help_lines[-1].partition(": dstrain ")[2])
    assert not {"--overwrite", "--dry_run"} & {*filling}
    assert main(filling) == 0
    run(given)
