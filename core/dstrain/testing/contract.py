"""What every part of the contract stands on: which variants and trainables are tested,
and the variant at toy sizes.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
import torch
from torch import Tensor

from dstrain.pipeline.pipeline import Pipeline
from dstrain.registry.discovery import load_family
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.split_equivalence import Outcome, run_unsplit_and_split
from dstrain.testing.timing import count
from dstrain.testing.trained_sets import (
    TrainedSet,
    conditioners,
    denoisers,
    trained_sets,
)

UnsplitAndSplit = Callable[[FamilyUnderTest, TrainedSet], tuple[Outcome, Outcome]]


class Published(Protocol):
    """How a family runs the published pipeline, to be compared with ours."""

    def __call__(
        self, pipe: Pipeline, folder: Path, arguments: Mapping[str, Any], /
    ) -> tuple[Sequence[Tensor], Any]:
        """Return the latents after each step, shaped as ours, and the picture, frames
        or array that come of them.

        pipe: ours, whose components are to be used. folder: the toy. arguments: those
        of the call of ours, with the initial noise as `latents`. NaN where the
        published pipeline's latents mean nothing.
        """


class Contract:
    """The fixtures and parameters of the kit's tests.

    family: its name; it must be installed. published: runs the published pipeline; None
    where there is none. published_images: how many pictures of a list that one takes.
    Plans and digests lie beside the subclass's file.
    """

    family: ClassVar[str]
    published: ClassVar[Published | None] = None
    published_images: ClassVar[int] = 2

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of every variant, and of every set of trainables, component or
        side of it that is asked for.
        """
        family, names = load_family(self.family), metafunc.fixturenames
        if "variant" not in names:
            return
        rows: list[tuple[str, Any]] = []
        second = next(
            (
                name
                for name in ("trained", "component", "adapted", "guided")
                if name in names
            ),
            "",
        )
        for variant in family.variants:
            spec = family.load("pipelines")(variant)
            networks = (*denoisers(family, spec), *conditioners(family, spec))
            choices: Mapping[str, Sequence[Any]] = {
                "": ("",),
                "trained": trained_sets(family, spec),
                "component": networks,
                "adapted": [name for name in networks if name in family.lora_targets],
                "guided": (False, True) if spec.cfg_inputs else (False,),
            }
            untested = "reference" in names and self.published is None
            rows += [(variant, value) for value in choices[second] if not untested]
        if second:
            metafunc.parametrize(
                ("variant", second),
                rows,
                ids=[f"{v}-{_name(value)}" for v, value in rows],
            )
        else:
            metafunc.parametrize("variant", [variant for variant, _ in rows])

    @pytest.fixture(scope="class")
    @classmethod
    def tested_variants(
        cls, tmp_path_factory: pytest.TempPathFactory
    ) -> Callable[[str], FamilyUnderTest]:
        """Variant -> what is tested, made once for all tests of this class."""
        folder, family = tmp_path_factory.mktemp(cls.family), load_family(cls.family)
        return cache(lambda variant: FamilyUnderTest(family, variant, folder / variant))

    @pytest.fixture(scope="class")
    @classmethod
    def unsplit_and_split(cls) -> UnsplitAndSplit:
        """Both ways of running a set of trainables, each set once for all tests of this
        class.
        """
        return cache(run_unsplit_and_split)

    @pytest.fixture
    def tested(
        self,
        variant: str,
        tested_variants: Callable[[str], FamilyUnderTest],
        request: pytest.FixtureRequest,
    ) -> Iterator[FamilyUnderTest]:
        """The variant at toy sizes; its CPU seconds are counted."""
        threads = torch.get_num_threads()
        torch.set_num_threads(
            1
        )  # at toy sizes several would wait for each other most of the time
        with count(request.config, f"{self.family} {variant}"):
            yield tested_variants(variant)
        torch.set_num_threads(threads)

    @pytest.fixture
    def reference(self) -> Published | None:
        """The published pipeline."""
        return self.published

    @property
    def folder(self) -> Path:
        """Where the plans and digests lie: beside the subclass's file."""
        return Path(inspect.getfile(type(self))).parent

    @property
    def advice(self) -> str:
        """What to do when a plan or a digest changed and that is meant."""
        return f"if this is meant: python -m dstrain.testing {self.family} {self.folder}, and look at what it changed"


def _name(value: Any) -> str:
    """How a test id has a parameter."""
    return (
        ("guided" if value else "plain")
        if isinstance(value, bool)
        else str(getattr(value, "name", value))
    )
