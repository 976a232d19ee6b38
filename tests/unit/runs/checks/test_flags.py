"""Options that a run cannot have are refused before rows are read and weights are loaded."""

from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.runs.resolve import resolve

from tests.support.runs import config, project


@pytest.mark.parametrize(
    ("flags", "where", "named"),
    [
        ({"resolution": "2"}, "--resolution", "2"),
        ({"trainable_dtype": "bf16"}, "--trainable_dtype", "--mixed_precision"),
        ({"trainable_models": "ditt"}, "--trainable_models", "'dit'"),
        (
            {"preset_lora_model": "ditt", "preset_lora_path": Path("a")},
            "--preset_lora_model",
            "'dit'",
        ),
        ({"optimizer": "schedulefree", "ema_decay": 0.9}, "--ema_decay", "twice"),
        ({"default_caption": "a"}, "--default_caption", "caption"),
    ],
)
def test_what_a_run_cannot_have_is_refused(
    flags: dict[str, Any], where: str, named: str, tiny: Path, tmp_path: Path
) -> None:
    project(tmp_path)
    for path in (tmp_path / "data").glob("*.png"):
        path.unlink()
    with pytest.raises(UsageError, match=named) as caught:
        resolve(config(tmp_path, **flags))
    assert caught.value.where == where
