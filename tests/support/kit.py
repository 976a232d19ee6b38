"""Families from the template, whole or with a breach of the contract, and runs of the
kit on them.
"""

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest
from dstrain.registry import write_plugin

Change = tuple[str, str, str]
"""A file of the package, what stands in it, and what stands there instead."""
WITH_ANOTHER_SEED = """\
def write(folder, variant="base", seed=0, sizes=None):
    import time
    same(folder, variant, time.time_ns(), sizes)

"""
COUNTS_ITS_CALLS = (
    (
        "networks.py",
        "        return prediction",
        "        self.calls = getattr(self, 'calls', 0) + 1\n        return prediction * self.calls",
    ),
)
PEEKS_AT_THE_DENOISER = """
class Peeking(DiffusersNetwork):
    def load(self, files, *rest):
        (files.folder.parent / "transformer/config.json").read_text()
        return super().load(files, *rest)
"""
STANDS_STILL = """    @staticmethod
    def published(pipe, folder, arguments):
        return [arguments["latents"]] * 3, pipe(**arguments)

    family"""
ENCODES_OTHERWISE = """    @staticmethod
    def published_latents(pipe, folder, arguments):
        from dstrain.plugin.functional import images_to_tensor
        pixels = images_to_tensor([arguments["input_image"]])
        return 2 * pipe.components["vae"].encoder(pixels)

    family"""
HOLDS_WITHOUT_A_MASK = """        constrain_latents=model_fn.hold,
        defaults="""
HOLD = """
def hold(latents, timestep, noise):
    from dstrain.plugin import LatentConstraint
    held = latents.clone()
    held[:, :, 0] = 0
    return LatentConstraint(held, timestep)


def latent_shape("""
AGREES = """    @staticmethod
    def published(pipe, folder, arguments):
        latents = []
        made = pipe(**arguments, on_step=lambda i, now: latents.append(now))
        return latents, made

    family"""
BREACHES: Mapping[str, tuple[Change, ...]] = MappingProxyType(
    {
        "importing_the_family_imports_nothing_heavy": (
            ("__init__.py", "from dstrain", "import numpy\nfrom dstrain"),
        ),
        "the_family_names_what_the_variants_have": (
            ("__init__.py", '"text_encoder": ("layer",)', '"encoder": ("layer",)'),
        ),
        "every_mask_is_cropped_with_what_it_is_of": (
            (
                "pipeline.py",
                '            "height": Measured(',
                '            "mask": Column("mask", "image"),\n            "height": Measured(',
            ),
            (
                "units.py",
                "input_image: Image.Image, *, vae",
                "input_image: Image.Image, mask: Image.Image, *, vae",
            ),
        ),
        "equal_arguments_write_equal_toys": (
            ("toy.py", "write = toy_writer(", f"{WITH_ANOTHER_SEED}same = toy_writer("),
        ),
        "the_files_of_every_network_are_recognized": (
            ("components.py", '"layer.weight"', '"layers.weight"'),
        ),
        "model_files_are_those_of_every_network": (
            ("__init__.py", '            "vae": "vae/*.safetensors",\n', ""),
        ),
        "everything_declared_is_used": (
            (
                "pipeline.py",
                '("dit", "text_encoder", "vae")',
                '("dit", "text_encoder", "vae", "idle")',
            ),
        ),
        "units_make_the_kinds_of_values_they_declare": (
            ("units.py", "    prompt_mask: Tensor", "    prompt_mask: list[Tensor]"),
        ),
        "inference_begins_with_latents_shaped": (
            (
                "model_fn.py",
                "height // DOWNSCALE, width // DOWNSCALE)",
                "width // DOWNSCALE, height // DOWNSCALE)",
            ),
        ),
        "plans_are_the_golden_ones": (
            (
                "units.py",
                "encode_prompt(prompt: str, *,",
                "encode_prompt(prompt: str, width: int = 0, *,",
            ),
        ),
        "units_make_what_they_made": (
            (
                "units.py",
                "images_to_tensor([input_image])",
                "0.99 * images_to_tensor([input_image])",
            ),
        ),
        "modulation_is_of_layers_that_scale_others": (
            (
                "components.py",
                'key_patterns=("proj_in.weight"',
                'modulation=("to_out",),\n        key_patterns=("proj_in.weight"',
            ),
        ),
        "lora_targets_match_layers": (("__init__.py", '("to_q", ', '("to_z", '),),
        "split_equals_unsplit": (
            (
                "units.py",
                "        ).float()\n",
                "        ).float() + torch.rand(())\n",
            ),
        ),
        "each_stage_needs_no_file_of_the_other": (
            (
                "components.py",
                "COMPONENTS = (",
                PEEKS_AT_THE_DENOISER + "\n\nCOMPONENTS = (",
            ),
            ("components.py", "network=DiffusersNetwork(", "network=Peeking("),
        ),
        "every_trained_parameter_gets_a_gradient": (
            (
                "networks.py",
                "self.time = ",
                "self.idle = nn.Linear(2, 2)\n        self.time = ",
            ),
        ),
        "only_what_is_trained_is_in_training_mode": (
            (
                "model_fn.py",
                "    prediction: Tensor = dit(",
                "    dit.eval()\n    prediction: Tensor = dit(",
            ),
        ),
        "unused_parameters_are_those": (
            (
                "pipeline.py",
                "        defaults=",
                '        unused_parameters={"dit": ("time.*",)},\n        defaults=',
            ),
        ),
        "a_sample_has_the_loss_that_it_has_alone": (
            ("networks.py", "attn_mask=visible[:, None]", "attn_mask=None"),
        ),
        "training_latents_equal_the_published": (
            ("../tests/test_conformance.py", "    family", ENCODES_OTHERWISE),
        ),
        "the_loss_leaves_out_what_is_held": (
            ("model_fn.py", "def latent_shape(", HOLD.lstrip()),
            ("pipeline.py", "        defaults=", HOLDS_WITHOUT_A_MASK),
        ),
        "the_least_sizes_are_made": (
            ("pipeline.py", "multiple=model_fn.DOWNSCALE", "multiple=4"),
        ),
        "bf16_is_near_fp32": (
            (
                "units.py",
                "to(device, dtype)\n        ).float()",
                "to(device)\n        ).float()",
            ),
        ),
        "a_lora_file_gives_back": COUNTS_ITS_CALLS,
        "a_checkpoint_gives_back": COUNTS_ITS_CALLS,
        "inference_makes_what_was_asked_for": (
            (
                "units.py",
                "vae.decoder(latents.to(dtype))",
                "vae.decoder(latents.to(dtype)).mT",
            ),
        ),
        "every_step_equals_that_of_the_published": (
            ("../tests/test_conformance.py", "    family", STANDS_STILL),
        ),
    }
)
"""What a test of the kit is called -> changes to the template that this test, perhaps
among others, must see.
"""

OTHERS = tuple(
    (
        one["test"],
        tuple((row["file"], row["old"], row["new"]) for row in one["changes"]),
    )
    for one in tomllib.loads(Path(__file__).with_name("breaches.toml").read_text())[
        "breach"
    ]
)
"""What a test is called, and changes that it must see for another of its reasons."""


@dataclass
class Outcomes:
    """A pytest plugin that notes how each test ended, by its name."""

    failed: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)


def install_family(name: str, site: Path, changes: tuple[Change, ...] = ()) -> Path:
    """Write and install a family from the template, with changes; returns the folder of
    its tests.
    """
    made = site.parent / name
    write_plugin(name, made)
    (site / f"dstrain_{name}").symlink_to(made / f"dstrain_{name}")
    info = site / f"plugin_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[dstrain.models]\n{name} = dstrain_{name}:MODEL\n"
    )
    for place, old, new in changes:
        path = made / f"dstrain_{name}" / place
        text = path.read_text()
        assert old in text, (place, old)
        # The last one: a record's and a pipeline spec's closing bracket, a network's
        # last return.
        before, _, after = text.rpartition(old)
        path.write_text(before + new + after)
    return made / "tests"


def run_kit(tests: Path, only: str = "") -> Outcomes:
    """Run a family's conformance test in this process."""
    outcomes = Outcomes()
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        str(tests),
        "-k",
        only,
    ]
    pytest.main(words, plugins=[outcomes])
    for module, one in tuple(sys.modules.items()):
        if str(getattr(one, "__file__", "")).startswith(
            str(tests)
        ):  # the next family's has the same name
            del sys.modules[module]
    return outcomes


def fails(breach: str, site: Path) -> bool:
    """Return whether a family with this breach fails the test that it is named after."""
    tests = install_family(f"broken_{breach}", site, BREACHES[breach])
    return any(breach in test for test in run_kit(tests, breach).failed)
