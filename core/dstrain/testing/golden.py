"""Golden plans: a file for each variant and set of trained components."""

from pathlib import Path

from dstrain.graph import PipelineSpec, as_text, make_plan
from dstrain.registry import ModelFamily
from dstrain.testing.rows import data_inputs
from dstrain.testing.trained_sets import trained_sets
from dstrain.training import SFT

FOLDER = "plans"


def plan_texts(family: ModelFamily, spec: PipelineSpec) -> dict[str, str]:
    """Return the plans of one variant as `dstrain graph` prints them, by file name."""
    found = {}
    for trained in trained_sets(family, spec):
        plan = make_plan(spec, data_inputs(spec), SFT, trained.components)
        found[f"{spec.variant}-sft-{'+'.join(trained.components)}.txt"] = as_text(plan)
    return found


def write_plans(folder: Path, texts: dict[str, str]) -> None:
    """Write the plans of all variants, and remove stale ones."""
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    for path in place.glob("*.txt"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
