"""The plugin's record names a family without importing torch."""

import subprocess
import sys
from importlib.metadata import entry_points

from dstrain.plugin import Column
from dstrain_qwen_image.pipeline import PIPELINES


def test_importing_the_record_imports_no_torch() -> None:
    heavy = {"torch", "diffusers", "transformers", "numpy", "PIL"}
    code = f"import sys, dstrain_qwen_image; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_entry_point_is_the_record_and_every_part_of_it_loads() -> None:
    (point,) = entry_points(group="dstrain.models", name="qwen_image")
    family = point.load()
    assert family.name == "qwen_image"
    specs = [family.spec(variant) for variant in family.variants]
    assert {spec.family for spec in specs} == {family.name}
    names = {component.name for component in family.load("components")}
    assert {name for spec in specs for name in spec.components} == names
    assert set(family.model_ids) == set(family.variants)
    constants = {name for spec in specs for name in spec.constants}
    assert {
        option.name for option in family.options if not option.component
    } == constants
    assert {
        *family.lora_targets,
        *family.lora_prefixes,
        *family.default_ids,
        family.default_trainable,
    } <= names
    assert callable(family.load("toy"))


def test_every_mask_is_cropped_with_what_it_is_of() -> None:
    masks = {
        name: source.of
        for spec in PIPELINES.values()
        for name, source in spec.inputs.items()
        if isinstance(source, Column) and "mask" in name
    }
    assert masks == {
        "blockwise_controlnet_inpaint_mask": "blockwise_controlnet_image",
        "eligen_entity_masks": "input_image",
        "inpaint_mask": "input_image",
    }
