"""Tests of a family's LoRA files: other programs read them as we do, and they come
back.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dstrain.cli.main import main
from dstrain.errors import StateError
from dstrain.lora import LoraConfig, known_formats
from dstrain.lora.writer import save_lora
from dstrain.models import components_of
from dstrain.models.components import Component
from dstrain.pipeline import Pipeline
from dstrain.registry import ModelFamily, load_family
from dstrain.storage import CHECKSUM
from dstrain.testing.contract import ToyFixtures
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.loras import LoraReader, trained
from dstrain.testing.round_trips import train_and_save
from dstrain.testing.trained_sets import TrainedSet, adapters, conditioners, denoisers

RANK = 4
ALPHA = 6.0
EXACT = 1e-12
"""Greatest difference of predictions in fp64, as a part of the largest."""
FOLDED = 1e-6
"""The same where alpha / rank was multiplied in fp32."""


@dataclass(frozen=True)
class LoraCase:
    """LoRA on some layers of a component, and the programs in whose names it is saved."""

    variant: str
    component: str
    targets: str
    """The name of this set of target patterns."""
    patterns: tuple[str, ...]
    programs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the case's part of a test id."""
        return f"{self.variant}-{self.component}-{self.targets}"


@dataclass(frozen=True)
class Damage:
    """A change to a good file, and words of the error it must cause."""

    words: str
    keys: Callable[[str], str | None] = str
    """A key -> the key it becomes, or None to leave the tensor out."""
    header: Callable[[Mapping[str, str]], Mapping[str, str]] = dict
    wider: bool = False


def _bare(header: Mapping[str, str]) -> Mapping[str, str]:
    return {}


def _renamed(header: Mapping[str, str]) -> Mapping[str, str]:
    return {**header, "family": "another"}


# What diffusers' loader and others' load in part, with another strength or not at all,
# without a word.
DAMAGES = MappingProxyType(
    {
        "alpha lost": Damage("states no alpha", header=_bare),
        "prefix lost": Damage(
            "states no alpha", lambda key: key.partition(".")[2], _bare
        ),
        "peft's names": Damage(
            "adapter_config.json",
            lambda key: f"base_model.model.{key.partition('.')[2]}",
            _bare,
        ),
        "half of the pairs": Damage(
            "incomplete LoRA file", lambda key: None if "lora_B" in key else key
        ),
        "half of the layers": Damage(
            "incomplete LoRA file", lambda key: None if ".0." in key else key
        ),
        "names of nothing": Damage(
            "does not fit", lambda key: key.replace(".0.", ".zero.")
        ),
        "another width": Damage("does not fit", wider=True),
        "another family": Damage("is a LoRA for family another", header=_renamed),
    }
)


class LoraFiles(ToyFixtures):
    """Subclass it as `TestLoraFiles` in the family's `tests/test_lora_files.py`."""

    names: ClassVar[Mapping[str, Mapping[str, str]]]
    """Component -> program -> the program's name for a layer of the default targets."""
    readers: ClassVar[Mapping[str, Mapping[str, LoraReader]]]
    """Component -> program -> its rules; of networks beside the denoiser, those that are
    tested.
    """
    targets: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Name -> target patterns of the denoiser, tested beside the default ones, each
    alias, and all aliases.
    """

    @staticmethod
    def prediction(component: str, network: Any) -> Tensor:
        """Return what a network predicts for inputs that are the same at each call, in
        its own dtype.
        """
        raise NotImplementedError

    @staticmethod
    def load_published(case: LoraCase, file: Path, parts: dict[str, Any]) -> None:
        """Load the file's layers into one of a pipeline's parts with diffusers' own
        loader.
        """
        raise NotImplementedError

    @staticmethod
    def published_takes(case: LoraCase, program: str) -> bool:
        """Return whether diffusers' loader takes such a file at toy sizes."""
        return program == "diffusers"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test over the targets of every component, or over the programs
        that name the default ones.
        """
        names = metafunc.fixturenames
        cases = list(self._cases(load_family(self.family)))
        rows = [(case, program) for case in cases for program in case.programs]
        if "published" in names:
            chosen = [row for row in rows if self.published_takes(*row)]
            metafunc.parametrize(
                ("case", "published"),
                chosen,
                ids=[f"{case.name}-{program}" for case, program in chosen],
            )
        elif "foreign" in names:
            chosen = [
                row
                for row in rows
                if row[0].targets == "default"
                and row[1] in self.readers[row[0].component]
            ]
            metafunc.parametrize(
                ("case", "foreign"),
                chosen,
                ids=[f"{case.name}-{program}" for case, program in chosen],
            )
        elif "case" in names:
            metafunc.parametrize("case", cases, ids=[case.name for case in cases])

    def _cases(self, family: ModelFamily) -> Iterator[LoraCase]:
        known = components_of(family)
        seen: set[str] = set()
        for variant in family.variants:
            spec = family.spec(variant)
            encoders = [
                name
                for name in conditioners(family, spec)
                if name in family.lora_targets
            ]
            beside = [name for name in adapters(family, spec) if name in self.readers]
            for part in (
                *denoisers(family, spec),
                *(name for name in (*encoders, *beside) if name not in seen),
            ):
                programs = _programs(known[part], family)
                if part in seen:  # the same layers, but for a few: two namings show it
                    programs = tuple(
                        one for one in programs if one in ("diffusers", "comfyui")
                    )
                yield LoraCase(
                    variant, part, "default", family.lora_targets[part], programs
                )
                if not seen:
                    every = {**self.targets, "aliases": tuple(family.lora_aliases)}
                    yield from (
                        LoraCase(variant, part, name, ends, programs)
                        for name, ends in every.items()
                        if ends
                    )
                    yield from (
                        LoraCase(variant, part, name, (name,), ("comfyui",))
                        for name in family.lora_aliases
                        if "comfyui" in programs
                    )
                seen.add(part)

    @pytest.fixture
    def fresh(
        self, tested_variants: Callable[[str], FamilyUnderTest]
    ) -> Callable[[str, str], Any]:
        """Return a function from variant and component to a copy of the network."""
        return lambda variant, component: deepcopy(
            tested_variants(variant).pipeline.components[component]
        )

    def saved(self, case: LoraCase, network: Any, file: Path) -> Any:
        """Return the network with visible LoRA layers whose rank is not alpha, and the
        file that a run saves of them.
        """
        family = load_family(self.family)
        lora_config = LoraConfig(case.component, case.patterns, RANK, ALPHA)
        trained(
            network,
            lora_config,
            family.lora_aliases if case.targets != "default" else {},
        )
        content = (
            network.config.to_dict()
            if hasattr(network.config, "to_dict")
            else dict(network.config)
        )
        about = {
            "family": self.family,
            "variant": case.variant,
            "component": case.component,
            "config": content,
        }
        save_lora(
            file, network, lora_config, family.lora_prefixes[case.component], about
        )
        return network

    def loaded(self, case: LoraCase, network: nn.Module, file: Path) -> nn.Module:
        """Return a function that loads a file into a fresh network through a pipeline."""
        family = load_family(self.family)
        Pipeline(
            family.spec(case.variant), family, {case.component: network}
        ).load_lora(file)
        return network

    @torch.no_grad()
    def predicted(self, case: LoraCase, network: nn.Module) -> Tensor:
        """Return what a case's network predicts for inputs that are always the same."""
        return self.prediction(case.component, network)

    def test_an_exported_file_comes_back_and_acts_alike_where_it_goes(
        self, case: LoraCase, fresh: Callable[[str, str], Any], tmp_path: Path
    ) -> None:
        """It comes back bit for bit. To what was trained it is equal but for one rounding
        of alpha / rank.
        """
        plain = fresh(case.variant, case.component)
        file = tmp_path / "lora.safetensors"
        ours = self.saved(case, deepcopy(plain), file)
        wanted = self.predicted(case, ours)
        exact = self.predicted(case, ours.double())
        assert _differ(self.predicted(case, plain), wanted) > 1e-3
        ours_again = self.loaded(case, deepcopy(plain), file)
        written = self.predicted(case, ours_again)
        assert _differ(self.predicted(case, ours_again.double()), exact) <= FOLDED
        for program in case.programs:
            output = _converted(file, program)
            again = self.loaded(case, deepcopy(plain), output)
            assert torch.equal(self.predicted(case, again), written)
            tensors = load_file(output)
            if case.targets == "default":
                assert self.names[case.component][program] in {
                    re.split(r"\.(lora_|alpha)", key)[0] for key in tensors
                }
            if program == "diffusers":
                continue
            theirs, unused = self.readers[case.component][program].read(plain, tensors)
            assert unused == []
            assert _differ(self.predicted(case, theirs), exact) <= FOLDED

    def test_a_file_that_a_program_wrote_acts_here_as_it_does_there(
        self,
        case: LoraCase,
        foreign: str,
        fresh: Callable[[str, str], Any],
        tmp_path: Path,
    ) -> None:
        """Every linear layer is covered. DiffSynth-Studio's files name an adapter and
        have no alpha.
        """
        plain = fresh(case.variant, case.component)
        reader = self.readers[case.component][foreign]
        tensors = reader.lora(plain, 2, None if foreign == "diffsynth" else 3.0)
        save_file(tensors, tmp_path / "theirs.safetensors")
        there, unused = reader.read(plain, tensors)
        wanted = self.predicted(case, there)
        assert unused == []
        here = self.loaded(
            case, deepcopy(plain), tmp_path / "theirs.safetensors"
        ).double()
        assert _differ(self.predicted(case, here), wanted) <= EXACT
        assert _differ(self.predicted(case, plain.double()), wanted) > 1e-3

    def test_diffusers_own_loader_takes_every_layer(
        self,
        case: LoraCase,
        published: str,
        tested_variants: Callable[[str], FamilyUnderTest],
        fresh: Callable[[str, str], Any],
        tmp_path: Path,
    ) -> None:
        """Predictions are equal in every program's names."""
        parts = dict(tested_variants(case.variant).pipeline.components)
        parts[case.component] = fresh(case.variant, case.component)
        plain = self.predicted(case, parts[case.component])
        ours = self.saved(
            case, fresh(case.variant, case.component), tmp_path / "lora.safetensors"
        )
        converted = _converted(tmp_path / "lora.safetensors", published)
        self.load_published(case, converted, parts)
        assert _layers(parts[case.component]) == _layers(ours) > 0
        wanted = self.predicted(case, ours.double())
        assert (
            _differ(self.predicted(case, parts[case.component].double()), wanted)
            <= FOLDED
        )
        assert _differ(plain.double(), wanted) > 1e-3

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_what_others_lose_in_silence_is_refused_here(
        self, damage: str, fresh: Callable[[str, str], Any], tmp_path: Path
    ) -> None:
        """The error names the file, and the network stays as it was."""
        family = load_family(self.family)
        part = family.default_trainable
        case = LoraCase(
            family.variants[0],
            part,
            "default",
            family.lora_targets[part],
            ("diffusers",),
        )
        self.saved(case, fresh(case.variant, part), tmp_path / "lora.safetensors")
        _damage(tmp_path / "lora.safetensors", DAMAGES[damage])
        network = fresh(case.variant, part)
        with pytest.raises(StateError, match=DAMAGES[damage].words):
            self.loaded(case, network, tmp_path / "lora.safetensors")
        assert _layers(network) == 0

    def test_a_trained_lora_makes_the_same_image_in_every_programs_names(
        self, tested_variants: Callable[[str], FamilyUnderTest], tmp_path: Path
    ) -> None:
        """It goes as a user does it: `dstrain export`, then `dstrain generate`."""
        family = load_family(self.family)
        tested = tested_variants(family.variants[0])
        part = family.default_trainable
        files = {"": train_and_save(tested, TrainedSet(lora=part), tmp_path).file}
        known = _programs(components_of(family)[part], family)
        for program in known:
            files[program] = _converted(files[""], program)
        models = [
            "--model_paths",
            json.dumps([list(map(str, paths)) for paths in tested.files.values()]),
        ]
        video = "video" in tested.spec.decoders[-1].outputs.values()
        flags = {
            "height": 32,
            "width": 32,
            "num_inference_steps": 1,
            "guidance_scale": 1,
            "prompt": "a dog",
        }
        given = [
            word for name, value in flags.items() for word in (f"--{name}", str(value))
        ]
        given += ["--num_frames", "1"] if video else []
        made = {}
        for name, file in {**files, "plain": None}.items():
            # A PNG would name the LoRA.
            output = tmp_path / f"made-{name}.{'mp4' if video else 'bmp'}"
            given_lora = [] if file is None else ["--lora", str(file)]
            command = [
                "generate",
                "--model",
                self.family,
                "--variant",
                tested.variant,
                *models,
                *given,
                *given_lora,
            ]
            assert main([*command, "--output", str(output)]) == 0
            made[name] = output.read_bytes()
        assert {name for name, content in made.items() if content == made[""]} == set(
            files
        )


def _programs(component: Component, family: ModelFamily) -> tuple[str, ...]:
    """Return the installed formats that have names for a component's layers."""
    return tuple(
        name
        for name, one in known_formats().items()
        if one.has_names(component, family, "lora")
    )


def _converted(file: Path, program: str) -> Path:
    """Return a LoRA file in a program's names, as `dstrain export` makes it; a run writes
    those of diffusers.
    """
    if program == "diffusers":
        return file
    output = file.with_name(f"{program}.safetensors")
    assert main(["export", "--format", program, str(file), str(output)]) == 0
    return output


def _differ(made: Tensor, wanted: Tensor) -> float:
    """Return the greatest difference relative to the greatest value."""
    return ((made - wanted).abs().max() / wanted.abs().max()).item()


def _layers(network: nn.Module) -> int:
    """Count the layers with LoRA, without those of zeros alone, which diffusers adds."""
    return sum(
        ".lora_B." in name and bool(weight.any())
        for name, weight in network.named_parameters()
    )


def _damage(path: Path, damage: Damage) -> None:
    with safe_open(path, framework="pt") as file:
        header = {
            name: value for name, value in file.metadata().items() if name != CHECKSUM
        }
    tensors = {damage.keys(key): tensor for key, tensor in load_file(path).items()}
    kept = {
        key: torch.cat([tensor] * 2, 1) if damage.wider and "_A" in key else tensor
        for key, tensor in tensors.items()
        if key
    }
    save_file(kept, path, metadata=dict(damage.header(header)))
