"""A run from the cache resumes after stage 1 was run again only if its cached values are
the same.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MappingProxyType

import pytest
from dstrain import StateError

from tests.support.runs import outcome, same, train
from tests.support.stage_project import (
    Project,
    another_image,
    caption,
    encoder,
    encoder_time,
    image_times,
    moved_folder,
    setting,
    unit_code,
    unit_formatting,
)

pytestmark = pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)


def two_images(project: Project) -> None:
    another_image(project.data / "0.png")
    another_image(project.data / "2.png")


def older_state(project: Project) -> None:
    """Let its cached values have the digest of a version whose keys followed another rule."""
    folder = project.folder / "resumed/states/step-2"
    state, record = (folder / name for name in ("state.json", "record.json"))
    saved = json.loads(state.read_text())
    saved["content"]["cached values"] = saved["content"].pop(VALUES)[::-1]
    state.write_text(json.dumps(saved))
    digests = json.loads(record.read_text())
    digests["sha256"][state.name] = sha256(state.read_bytes()).hexdigest()
    record.write_text(json.dumps(digests))


def nothing(project: Project) -> None:
    pass


VALUES = "cached values of stage 1"
RESUMED: Mapping[Callable[[Project], None], str] = MappingProxyType(
    {
        nothing: "",
        older_state: "",
        image_times: "",
        encoder_time: "",
        moved_folder: "",
        unit_formatting: "",
        two_images: "cached values",
        encoder: "cached values",
        unit_code: "cached values",
        setting: "cached values",
        caption: "cached values",
    }
)
"""What changes before stage 1 runs again -> why the saved run is not resumed."""


@pytest.mark.parametrize("change", RESUMED, ids=lambda change: change.__name__)
def test_a_run_from_the_cache_resumes_with_the_values_that_it_began_with(
    change: Callable[[Project], None],
    filled: Project,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = {"task": "sft:train", "feature_cache": filled.folder / "cache"}
    out = filled.folder / "resumed"
    train(filled.folder, output_path=out, max_steps=2, **flags, **filled.flags)
    change(filled)
    filled.fill()
    whole = filled.stage_2(max_steps=4)
    again = {**flags, **filled.flags, "max_steps": 4, "resume": "auto"}
    if RESUMED[change]:
        with pytest.raises(StateError, match=RESUMED[change]) as caught:
            train(filled.folder, output_path=out, **again)
        assert caught.value.exit_code == 3
    else:
        found = outcome(train(filled.folder, output_path=out, **again))
        last = "step-4.safetensors"
        assert same(found["files"][last], whole["files"][last])
        assert ("an older version" in capsys.readouterr().err) == (
            change is older_state
        )
