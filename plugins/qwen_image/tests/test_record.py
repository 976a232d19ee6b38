"""The plugin's record names a family without importing torch."""

import subprocess
import sys
from importlib.metadata import entry_points


def test_importing_the_record_imports_no_torch() -> None:
    heavy = {"torch", "diffusers", "transformers", "numpy", "PIL"}
    code = f"import sys, dstrain_qwen_image; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_entry_point_is_the_record_and_every_part_of_it_loads() -> None:
    (point,) = entry_points(group="dstrain.models", name="qwen_image")
    record = point.load()
    assert record.name == "qwen_image"
    wirings = [record.load("wiring")(variant) for variant in record.variants]
    assert {wiring.family for wiring in wirings} == {record.name}
    names = {component.name for component in record.load("components")}
    assert {name for wiring in wirings for name in wiring.components} == names
    assert set(record.model_ids) == set(record.variants)
    settings = {name for wiring in wirings for name in wiring.settings}
    assert {
        option.name for option in record.options if not option.component
    } == settings
    assert {
        *record.lora_targets,
        *record.lora_prefixes,
        *record.default_ids,
        record.default_trainable,
    } <= names
    assert callable(record.load("toy"))
    assert callable(record.load("variants_for"))
