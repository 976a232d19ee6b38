"""Fixtures and parameters that all tests of the conformance kit share."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
import torch
from torch import Tensor

from dstrain.pipeline import Pipeline
from dstrain.registry import load_family
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.split_equivalence import Outcome, run_unsplit_and_split
from dstrain.testing.timing import count
from dstrain.testing.trained_sets import (
    TrainedSet,
    adapters,
    conditioners,
    denoisers,
    trained_sets,
)

UnsplitAndSplit = Callable[[FamilyUnderTest, TrainedSet], tuple[Outcome, Outcome]]


class Published(Protocol):
    """A function that runs the published pipeline, for comparison."""

    def __call__(
        self, pipe: Pipeline, folder: Path, arguments: Mapping[str, Any], /
    ) -> tuple[Sequence[Tensor], Any]:
        """Return the latents after each step, shaped as ours, and the image, frames or
        array generated from them.

        Latents are NaN where those of the published pipeline have no meaning.

        Args:
            pipe: The family's pipeline, whose components are to be used.
            folder: The folder of the toy model.
            arguments: Those that `pipe` is called with, the initial noise as `latents`.
        """


class PublishedLatents(Protocol):
    """A function that encodes what training learns as the published pipeline does."""

    def __call__(
        self, pipe: Pipeline, folder: Path, arguments: Mapping[str, Any], /
    ) -> Tensor:
        """Return the latents of the image or video, shaped as `input_latents`.

        Args:
            pipe: The family's pipeline, whose components are to be used.
            folder: The folder of the toy model.
            arguments: Every input of the variant, the image or video among them.
        """


class ToyFixtures:
    """The toys of a family, as a fixture."""

    family: ClassVar[str]
    """The name of an installed family."""

    @pytest.fixture(scope="class")
    @classmethod
    def tested_variants(
        cls, tmp_path_factory: pytest.TempPathFactory
    ) -> Callable[[str], FamilyUnderTest]:
        """Return a function from a variant to its toy, built once for all tests of the
        class.
        """
        family = load_family(cls.family)
        folder = tmp_path_factory.mktemp(cls.family)
        return cache(lambda variant: FamilyUnderTest(family, variant, folder / variant))


class Contract(ToyFixtures):
    """The fixtures and parameters of the kit's tests.

    Plans and fingerprints lie beside the subclass's file.
    """

    published: ClassVar[Published | None] = None
    """Runs the published pipeline; None where there is none."""
    published_latents: ClassVar[PublishedLatents | None] = None
    """Encodes as the published pipeline does; None where there is none. A family with
    `published` has both: inference does not show what training encodes.
    """
    published_images: ClassVar[int] = 2
    """How many images of a list the published pipeline takes."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test over variants, and over the trainables, components or
        guidance that it asks for.
        """
        names = metafunc.fixturenames
        if "variant" not in names:
            return
        family = load_family(self.family)
        rows: list[tuple[str, Any]] = []
        second = ""
        for name in ("trained", "component", "adapted", "guided"):
            if name in names:
                second = name
        for variant in family.variants:
            spec = family.spec(variant)
            networks = (
                *denoisers(family, spec),
                *adapters(family, spec),
                *conditioners(family, spec),
            )
            choices: Mapping[str, Sequence[Any]] = {
                "": ("",),
                "trained": trained_sets(family, spec),
                "component": networks,
                "adapted": [name for name in networks if name in family.lora_targets],
                "guided": (False, True) if spec.cfg_inputs else (False,),
            }
            untested = "reference" in names and self.published is None
            if "latents_reference" in names:
                untested = (self.published or self.published_latents) is None
            rows += [(variant, value) for value in choices[second] if not untested]
        if second:
            metafunc.parametrize(
                ("variant", second),
                rows,
                ids=[f"{variant}-{_name(value)}" for variant, value in rows],
            )
        else:
            metafunc.parametrize("variant", [variant for variant, _ in rows])

    @pytest.fixture(scope="class")
    @classmethod
    def unsplit_and_split(cls) -> UnsplitAndSplit:
        """Return a function that runs a set of trainables unsplit and split, once for
        all tests of the class.
        """
        return cache(run_unsplit_and_split)

    @pytest.fixture
    def tested(
        self,
        variant: str,
        tested_variants: Callable[[str], FamilyUnderTest],
        request: pytest.FixtureRequest,
    ) -> Iterator[FamilyUnderTest]:
        """Yield the variant at toy sizes, and count the CPU seconds of the test."""
        threads = torch.get_num_threads()
        # At toy sizes several would wait for each other most of the time.
        torch.set_num_threads(1)
        with count(request.config, f"{self.family} {variant}"):
            yield tested_variants(variant)
        torch.set_num_threads(threads)

    @pytest.fixture
    def reference(self) -> Published | None:
        """Return the function that runs the published pipeline."""
        return self.published

    @pytest.fixture
    def latents_reference(self) -> PublishedLatents | None:
        """Return the function that encodes as the published pipeline does."""
        return self.published_latents

    @property
    def folder(self) -> Path:
        """Return the folder of the plans and fingerprints: that of the subclass's file."""
        return Path(inspect.getfile(type(self))).parent

    @property
    def advice(self) -> str:
        """Return the advice for a plan or a fingerprint that was changed on purpose."""
        return f"if this is meant: python -m dstrain.testing {self.family} {self.folder}, and look at what it changed"


def _name(value: Any) -> str:
    """Return the part of a test id that stands for a parameter."""
    if isinstance(value, bool):
        return "guided" if value else "plain"
    return str(getattr(value, "name", value))
