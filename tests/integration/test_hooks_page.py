"""docs/plugins/hooks.md: each module that it shows works when it is installed."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.config import validate
from dstrain.errors import UsageError
from dstrain.registry import load_extensions
from PIL import Image
from safetensors.torch import load_file

from tests.integration.test_docs import blocks
from tests.support import ROOT

PAGE = ROOT / "docs/plugins/hooks.md"
OPTIONS = "my_options"
MODULES = {
    match[1]: block.body
    for block in blocks(PAGE.read_text())
    if (match := re.fullmatch(r"python file=(\w+)\.py", block.info))
}


@pytest.fixture
def page(fake_plugin: Callable[..., Path]) -> None:
    """All modules of the page, installed as one package."""
    entries = {name: name for name in MODULES if name != OPTIONS}
    fake_plugin("my-extension", entries, MODULES, group="dstrain")
    record = {OPTIONS: f"{OPTIONS}:MyOptions"}
    fake_plugin("my-options", record, {}, group="dstrain.options")


@pytest.mark.usefixtures("page")
def test_every_module_is_a_plugin_that_works() -> None:
    extensions = load_extensions()
    assert extensions.broken == []
    found = {plugin.name for plugin in extensions.managers}
    assert (
        {*found, OPTIONS}
        >= set(MODULES)
        == {
            "my_logger",
            "my_command",
            "my_extension",
            "my_keeper",
            "my_changes",
            "my_norms",
            "my_updater",
            OPTIONS,
        }
    )


@pytest.mark.usefixtures("page")
def test_the_options_are_checked_as_the_page_says() -> None:
    config = TrainConfig(model="qwen_image", toy=True, task="sft", bell_sound="gong")  # type: ignore[call-arg]  # of a plugin
    with pytest.raises(UsageError) as refused:
        validate(config)
    assert refused.value.where == "--bell_sound"


@pytest.mark.usefixtures("page")
def test_the_command_lists_captions_without_the_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a photo of sks dog")
    (tmp_path / "b.txt").write_text("a dog")
    assert main(["missing-trigger", str(tmp_path), "sks"]) == 0
    assert capsys.readouterr().out == "b.txt\n"


@pytest.mark.usefixtures("page")
def test_a_run_has_the_task_the_logger_and_the_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "photos"
    data.mkdir()
    Image.effect_noise((64, 64), 50).convert("RGB").save(data / "a.png")
    (data / "a.txt").write_text("a dog")
    log = tmp_path / "minima.txt"
    monkeypatch.setenv("MY_LOG", str(log))
    words = ["--model", "qwen_image", "--toy", "--task", "l1"]
    words += ["--dataset_base_path", str(data), "--trainable_models", "dit"]
    words += ["--learning_rate", "1", "--max_steps", "1", "--output_path"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert log.read_text().startswith("step 1: ")
    (path,) = (tmp_path / "out").glob("*.safetensors")
    weights = load_file(path)
    norms = [
        weight
        for name, weight in weights.items()
        if "norm" in name and name.endswith(".weight")
    ]
    assert norms
    # A learning rate of 1 moves each weight by about 1 in a step, and the hooks back.
    assert all(weight.min() >= 0.5 and weight.max() <= 1 for weight in norms)
    assert any(weight.min() == 0.5 for weight in norms)
