"""The public names and hooks change only on purpose: here they are written down, as the
options are in tests/unit/config/test_options.py.
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dstrain.registry.hooks import Hooks

from tests.support import ROOT

PUBLIC = {
    "dstrain": """
        Batch CacheError Callback ConstrainLatents DIRECT_DISTILL Diverged DstrainError Frames
        GenerateConfig InputError Interrupted Layers LoraConfig MissingFiles ModelConfig OutOfMemory
        Pipeline Predict Rng RunResult SFT Sample SampleKey StateError StepNumbers
        SystemFault TRAJECTORY_IMITATION Task TimestepSampler TrainConfig Trainables
        TrainingLogger TrainingModule UnitStages UsageError Video WeightsLogger
        flow_match generate gradient_checkpoint_forward launch_training_task run
        save_lora split_units
    """,
    "dstrain.plugin": """
        FilePath command families
        CheckpointFormat Column Component Constant DiffusersNetwork EntryCount GenerateConfig TrainConfig UsageError
        converted option options ExpertSchedule Files FlowMatchSchedule Frames InferenceOnly InputError KeyMap
        LatentConstraint LoraKeyFormat Measured ModelFamily Observer Option PipelineSpec Shapes
        Task Tokenizer
        TransformersNetwork Updater WatchedRun at_least between hookimpl one_of read_key_maps
        same_config toy_writer versioned
        DstrainError Images PromptRow RunFiles as_texts get_logger nearest progress_bar read_resolved redacted
        remove_leftovers save_image_or_video split_commas write_json
        CachedRows Defaults KeptWeights LargestSample PLAIN_TENSORS PlannedComponent PlannedRun Section
        Content Form FormCell FormRow Given Source fetch_dataset first_few read_limited shell_word
        Identity Keeper KeeperRequest KeptBytes WeightSize
    """,
    "dstrain.plugin.functional": """
        LongPrompt StoredLinear empty_component repeated_blocks
        apply_guidance around_blocks as_uint8 check_length check_sides checkpoint_through convert_image cover_image
        images_to_tensor latents_mean_std override_positional_args pack
        report_long_prompt tensor_to_image to_minus_one_one unpack
        white_pixels
    """,
    "dstrain.plugin.noise": "Diffusion MakeSampler NoiseProcess Prediction Sampler diffusers_sampler",
    "dstrain.testing": "Conformance LoraCase LoraFiles LoraReader Published PublishedLatents",
}
HOOKS = """
    dstrain_commands dstrain_defaults dstrain_dry_run dstrain_forms dstrain_hints dstrain_lora_formats
    dstrain_lora_types dstrain_modify_step dstrain_observers
    dstrain_keepers dstrain_rows dstrain_tasks dstrain_updater
"""
LAZY = ("dstrain", "dstrain.plugin")
FAMILIES = ("flux", "flux2", "qwen_image", "sdxl", "wan", "z_image")


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these_and_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module].split())
    assert all(hasattr(found, name) for name in found.__all__)
    assert set(found.__all__) <= set(dir(found))


def test_the_hooks_are_these() -> None:
    hooks = {name for name in vars(Hooks) if not name.startswith("_")}
    assert hooks == set(HOOKS.split())


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    for module in LAZY:
        with pytest.raises(AttributeError, match="Pipelin'"):
            importlib.import_module(module).Pipelin  # noqa: B018 # the access is tested


SCRIPT = """
from dstrain import Pipeline, TrainConfig

def load() -> None:
    reveal_type(Pipeline.from_pretrained("wan", []))
    TrainConfig(model="wan", learning_rat=1e-4)
"""


@pytest.mark.drawn  # a type checker reads torch for many seconds
def test_a_type_checker_infers_the_pipeline_and_refuses_a_misspelt_flag(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = (sys.executable, "-m", "mypy", "--strict", tmp_path / "script.py")
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert 'Revealed type is "dstrain.pipeline.pipeline.Pipeline"' in found
    assert 'Unexpected keyword argument "learning_rat" for "TrainConfig"' in found
    assert "Found 1 error in 1 file" in found


def imports_of_core(folder: Path) -> Iterator[str]:
    """The modules of core that the Python files in a folder import."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


def of_core(folder: Path) -> set[str]:
    return {
        name for name in imports_of_core(folder) if name.partition(".")[0] == "dstrain"
    }


INTERFACE = {"dstrain.plugin", "dstrain.plugin.functional", "dstrain.plugin.noise"}
"""What a family may import of core."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_imports_nothing_of_core_but_its_interface(family: str) -> None:
    used = of_core(ROOT / f"plugins/{family}/dstrain_{family}")
    assert used <= INTERFACE


def test_the_template_imports_public_modules_alone() -> None:
    template = ROOT / "core/dstrain/registry/template"
    assert of_core(template / "dstrain_my_model") <= INTERFACE
    assert of_core(template / "tests") <= {"dstrain", "dstrain.testing", *INTERFACE}


def test_the_types_are_packed() -> None:
    assert (ROOT / "core/dstrain/py.typed").is_file()
