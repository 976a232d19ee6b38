"""The conformance kit passes a family that keeps the contract, and each of its tests
fails one that breaks its part.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from dstrain.data.cells import load_cell
from dstrain.data.dataset import DataConfig, open_dataset
from dstrain.data.images import Resolution
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column, Constant, Measured
from dstrain.graph.values import Frames
from dstrain.registry.discovery import load_family
from dstrain.registry.scaffold import write_plugin
from dstrain.testing.__main__ import write as write_golden
from dstrain.testing.fingerprints import fingerprint, matches
from dstrain.testing.kinds import has_kind
from dstrain.testing.rows import frames, image_size, inputs, write_rows
from PIL import Image

PACKAGE = "dstrain_broken_{}"
Change = tuple[str, str, str]
"""A file of the package, what stands in it, and what stands there instead."""
TWO_VARIANTS = ("__init__.py", 'variants=("base",)', 'variants=("base", "other")')
ANOTHER_ENCODE_IMAGE = """
def encode_image(input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype) -> Latents:
    return globals()["_first"](input_image, vae=vae, device=device, dtype=dtype)
"""
COUNTS_ITS_CALLS = (
    (
        "networks.py",
        "        return prediction",
        "        self.calls = getattr(self, 'calls', 0) + 1\n        return prediction * self.calls",
    ),
)
PEEKS_AT_THE_DENOISER = """
def load(files, *rest):
    (files.folder.parent / "transformer/config.json").read_text()
    return TEXT_ENCODER.load(files, *rest)
"""
STANDS_STILL = """    @staticmethod
    def published(pipe, folder, arguments):
        return [arguments["latents"]] * 3, pipe(**arguments)

    family"""
AGREES = """    @staticmethod
    def published(pipe, folder, arguments):
        latents = []
        made = pipe(**arguments, on_step=lambda i, now: latents.append(now))
        return latents, made

    family"""
BREACHES: Mapping[str, tuple[Change, ...]] = MappingProxyType(
    {
        "importing_the_family_imports_nothing_heavy": (
            ("__init__.py", "from types", "import numpy\nfrom types"),
        ),
        "the_family_names_what_the_variants_have": (
            ("__init__.py", '"text_encoder": ("layer",)', '"encoder": ("layer",)'),
        ),
        "units_of_one_name_and_version_are_one_function": (
            TWO_VARIANTS,
            (
                "units.py",
                "def decode(",
                f"_first = encode_image\n\n{ANOTHER_ENCODE_IMAGE}\n\ndef decode(",
            ),
            (
                "pipeline.py",
                "Unit(units.encode_image)",
                'Unit(units._first if variant == "base" else units.encode_image)',
            ),
        ),
        "equal_arguments_write_equal_toys": (
            ("toy.py", "torch.manual_seed(seed)", "torch.seed()"),
        ),
        "the_files_of_every_network_are_recognised": (
            ("components.py", '"layer.weight"', '"layers.weight"'),
        ),
        "everything_declared_is_used": (
            (
                "pipeline.py",
                '"negative_prompt": InferenceOnly(),',
                '"negative_prompt": InferenceOnly(), "mood": Column("mood"),',
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
                "COMPONENTS: tuple",
                PEEKS_AT_THE_DENOISER + "\n\nCOMPONENTS: tuple",
            ),
            ("components.py", "load=TEXT_ENCODER.load", "load=load"),
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
                "    )\n",
                '        unused_parameters=MappingProxyType({"dit": ("time.*",)}),\n    )\n',
            ),
        ),
        "a_sample_has_the_loss_that_it_has_alone": (
            ("networks.py", "attn_mask=visible[:, None]", "attn_mask=None"),
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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path for families that are installed for one test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder


def family(name: str, site: Path, changes: tuple[Change, ...] = ()) -> Path:
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
        # The last one: a record's and a pipeline spec's closing bracket, a network's last
        # return.
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


def test_a_new_family_keeps_the_whole_contract(site: Path) -> None:
    outcomes = run_kit(family("fine", site))
    assert outcomes.failed == set()
    for name in BREACHES:
        assert any(name in test for test in outcomes.passed) or "published" in name, (
            name
        )


def test_every_test_of_the_kit_has_a_breach_that_it_sees() -> None:
    from dstrain.testing import Conformance

    tests = [name for name in dir(Conformance) if name.startswith("test_")]
    assert [
        name for name in tests if sum(breach in name for breach in BREACHES) != 1
    ] == []


@pytest.mark.parametrize("breach", BREACHES)
def test_a_family_that_breaks_the_contract_fails(breach: str, site: Path) -> None:
    name = f"broken_{breach}"
    assert any(
        breach in test
        for test in run_kit(family(name, site, BREACHES[breach]), breach).failed
    )


def test_a_family_equal_to_its_published_pipeline_passes(site: Path) -> None:
    """Here the published pipeline is the family's own."""
    tests = family(
        "published", site, (("../tests/test_conformance.py", "    family", AGREES),)
    )
    outcomes = run_kit(tests, "every_step_equals")
    assert (len(outcomes.passed), outcomes.failed) == (2, set())


def test_digests_change_only_under_a_new_version(site: Path) -> None:
    changes = (
        (
            "units.py",
            "images_to_tensor([input_image])",
            "0.99 * images_to_tensor([input_image])",
        ),
    )
    tests = family("dimmed", site, changes)
    with pytest.raises(
        UsageError,
        match=r"encode_image 1: makes another input_latents for base than recorded",
    ):
        write_golden("dimmed", tests)
    raised = (
        "pipeline.py",
        "Unit(units.encode_image)",
        "Unit(units.encode_image, version=2)",
    )
    tests = family("versioned", site, (*changes, raised))
    write_golden("versioned", tests)
    assert set(json.loads((tests / "digests.json").read_text())) == {
        "encode_image 2",
        "encode_prompt 1",
    }


def test_golden_files_of_what_is_unchanged_are_written_as_they_are_and_stale_plans_go(
    site: Path,
) -> None:
    tests = family("same", site)
    before = {
        path.name: path.read_bytes()
        for path in tests.rglob("*")
        if path.suffix in (".txt", ".json")
    }
    shutil.copy(tests / "plans/base-sft-dit.txt", tests / "plans/gone-sft-dit.txt")
    write_golden("same", tests)
    assert {
        path.name: path.read_bytes()
        for path in tests.rglob("*")
        if path.suffix in (".txt", ".json")
    } == before


@pytest.mark.parametrize(
    ("factor", "equal"), [(1.0, True), (1 + 2e-4, True), (1 + 5e-3, False)]
)
def test_digests_are_equal_within_a_thousandth(factor: float, equal: bool) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert matches(fingerprint(values, "x"), fingerprint(values * factor, "x")) is equal


def test_digests_tell_shapes_elements_texts_and_pixels_apart() -> None:
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    moved = values.clone()
    moved[5, 5] += 1
    black, grey = (Image.new("RGB", (8, 8), (level,) * 3) for level in (0, 9))
    for one, other in (
        (values, values.T),
        (values, moved),
        ("a", "b"),
        ([values], values),
        (black, grey),
        (1, 2),
    ):
        assert not matches(fingerprint(one, "x"), fingerprint(other, "x"))
        assert matches(
            fingerprint(one, "x"), json.loads(json.dumps(fingerprint(one, "x")))
        )
    mask = torch.ones(4, dtype=torch.bool)
    assert not matches(fingerprint(mask, "x"), fingerprint(~mask, "x"))
    assert matches(fingerprint(torch.zeros(0), "x"), fingerprint(torch.zeros(0), "x"))


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (torch.ones(1), "tensor", True),
        (1, "tensor", False),
        (True, "int", False),
        (None, "tensor | none", True),
        ([torch.ones(1)], "list[tensor]", True),
        ([1], "list[tensor]", False),
        ({"a": 1}, "{a: int}", True),
        ("a", "str", True),
    ],
    ids=str,
)
def test_kinds_of_values(value: object, kind: str, fits: bool) -> None:
    assert has_kind(value, kind) is fits


def test_rows_are_made_for_columns_of_every_kind_and_lack_what_is_optional(
    site: Path, tmp_path: Path
) -> None:
    family("kinds", site)
    plain = load_family("kinds").load("pipelines")("base")
    more = {
        "film": Column("film", "video", multiple=24, frame_multiple=4, fps=16.0),
        "first": Column("film", "image", frame="first", multiple=24),
        "count": Measured("film", "frames"),
        "mask": Column("mask", "image", mode="L"),
        "layer": Column("layer", "image", mode="RGBA"),
        "pictures": Column("pictures", "images"),
        "words": Column("words", "texts"),
        "number": Column("number", "number"),
        "whole": Column("whole", "integer"),
        "area": Constant(64),
    }
    spec = replace(plain, inputs={**plain.inputs, **more})
    assert (image_size(spec), frames(spec)) == ((48, 48), 9)
    folder = write_rows(spec, tmp_path / "data")
    dataset = open_dataset(
        DataConfig(folder, None, None, Resolution(None, None, 2**20)), spec.inputs
    )
    values = inputs(spec)
    lacking = {"first", "mask", "layer", "pictures", "number", "whole", "film", "count"}
    full = set(spec.inputs) - {"negative_prompt"}
    assert [set(row) for row in dataset.rows] == [full] * 3 + [full - lacking] * 2
    for name, cell in dataset.rows[0].items():
        loaded, value = load_cell(cell), values[name]
        assert type(loaded) is type(value), name
        if isinstance(value, Frames):
            assert (loaded.pixels.shape, loaded.fps) == (value.pixels.shape, value.fps)
        elif isinstance(value, Image.Image):
            assert (loaded.mode, loaded.size) == (value.mode, value.size)
            assert name == "first" or loaded.tobytes() == value.tobytes()
        elif name == "pictures":
            assert [image.tobytes() for image in loaded] == [
                image.tobytes() for image in value
            ]
        else:
            assert loaded == value, name
