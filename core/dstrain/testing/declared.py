"""Tests of what a family declares: components, toys, pipeline specs, units, plans and
LoRA targets.
"""

import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from pathlib import Path

import torch
from torch import nn

from dstrain.graph import Column, Measured
from dstrain.installed import GROUP
from dstrain.lora import LoraConfig, inject
from dstrain.models import ModelConfig, assign, component_at
from dstrain.registry import load_family
from dstrain.storage import sha256
from dstrain.testing.contract import Contract
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.fingerprints import (
    changed,
    read_fingerprints,
    unit_fingerprints,
    unit_values,
)
from dstrain.testing.golden import FOLDER, plan_texts
from dstrain.testing.kinds import has_kind
from dstrain.testing.rows import inputs, least_sizes, usual_size

HEAVY = ("PIL", "diffusers", "numpy", "torch", "transformers")
"""What importing a record must not import."""
MASK = re.compile(r"(^|_)masks?$")
"""The names of inputs that are masks; a masked image is none."""


class Declared(Contract):
    """What a family declares exists."""

    def test_importing_the_family_imports_nothing_heavy(self) -> None:
        """`dstrain plugins` imports every family, so the import must be light."""
        (entry,) = entry_points(group=GROUP, name=self.family)
        code = f"import sys, {entry.module}; print(*sorted({set(HEAVY)} & set(sys.modules)))"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            env=environment,
        )
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr

    def test_the_family_names_what_the_variants_have(self) -> None:
        """Components, variants and constants that the family names exist."""
        family = load_family(self.family)
        names = [component.name for component in family.load("components")]
        known = set(names)
        specs = [family.spec(variant) for variant in family.variants]
        assert [(spec.family, spec.variant) for spec in specs] == [
            (self.family, variant) for variant in family.variants
        ]
        assert len(known) == len(names)
        assert {name for spec in specs for name in spec.components} == known
        assert {
            *family.lora_targets,
            *family.lora_prefixes,
            *family.default_ids,
            family.default_trainable,
        } <= known
        assert family.lora_targets.keys() <= family.lora_prefixes.keys()
        assert family.model_ids.keys() <= set(family.variants)
        assert {option.component for option in family.options} <= {"", *known}
        constants = {name for spec in specs for name in spec.constants}
        assert {
            option.name
            for option in family.options
            if not option.component and not option.is_flag
        } <= constants

    def test_every_mask_is_cropped_with_what_it_is_of(self) -> None:
        """A file whose input is named a mask says with `of` which image or video it is of."""
        family = load_family(self.family)
        without = [
            f"{variant}: {name}"
            for variant in family.variants
            for name, source in family.spec(variant).inputs.items()
            if isinstance(source, Column) and source.is_file
            if MASK.search(name) and not source.of
        ]
        assert without == []

    def test_equal_arguments_write_equal_toys(
        self, tested: FamilyUnderTest, tmp_path: Path
    ) -> None:
        """Writing a toy leaves torch's global generator as it was."""
        assert tested.models
        before = torch.random.get_rng_state()
        tested.family.load("toy")(tmp_path / "again", tested.variant, 0)
        assert torch.equal(before, torch.random.get_rng_state())
        assert _contents(tmp_path / "again") == _contents(tested.model)

    def test_the_files_of_every_network_are_recognized(
        self, tested: FamilyUnderTest
    ) -> None:
        """Files are recognized by the names of their weights."""
        known = tested.family.load("components")
        networks = {
            component.name
            for component in known
            if not component.is_folder and component.name in tested.spec.components
        }
        assert set(assign(tested.models, known, networks)) == networks

    def test_model_files_are_those_of_every_network(
        self, tested: FamilyUnderTest
    ) -> None:
        """Each model that the record lists has files for every network of the first variant
        that it means, in places that are no other component's.
        """
        family = tested.family
        known = family.load("components")
        places = {one.name: one for one in known if not one.is_folder}
        needed = places.keys() & set(tested.spec.components)
        for model_id, files in family.model_files.items():
            assert files.keys() <= places.keys(), f"{model_id}: {list(files)}"
            if [tested.variant] == family.variants_of(model_id)[:1]:
                lacking = needed - files.keys()
                assert not lacking, f"{model_id} has no files of {sorted(lacking)}"
            for name, files_of in files.items():
                pattern = files_of.rpartition(":")[2]
                config = ModelConfig(None, model_id, pattern)
                is_own = places[name].is_published_as(pattern)
                assert is_own or not component_at(config, known), (
                    f"{model_id}: the place {pattern} is not that of {name}"
                )

    def test_everything_declared_is_used(self, tested: FamilyUnderTest) -> None:
        """Some function uses each component, and each input.

        An input is also used if it stands for one in the negative branch, or if another
        one is its size.
        """
        spec = tested.spec
        used = set(spec.cfg_inputs.values())
        others = (*spec.step_functions, spec.latent_shape)
        for function in (*spec.units, *others, *spec.decoders):
            used |= {name.removesuffix("_config") for name in function.components}
            used |= set(function.inputs)
        used |= {one.of for one in spec.inputs.values() if isinstance(one, Measured)}
        for role, components in spec.experts.roles.items() if spec.experts else ():
            if role in used:
                used |= set(components)
        assert {*spec.components, *spec.inputs} <= used

    def test_units_make_the_kinds_of_values_they_declare(
        self, tested: FamilyUnderTest
    ) -> None:
        """A unit returns values of the kinds that its TypedDict declares."""
        kinds = {unit.name: unit.outputs for unit in tested.spec.units}
        for unit, values in tested.values.items():
            wrong = {
                name: type(one).__name__
                for name, one in values.items()
                if not has_kind(one, kinds[unit][name])
            }
            assert not wrong, f"{unit} declares {dict(kinds[unit])}"

    def test_inference_begins_with_latents_shaped_as_those_of_training(
        self, tested: FamilyUnderTest
    ) -> None:
        """`latent_shape` agrees with the unit that returns `input_latents`, at the
        usual size and at the least ones that the columns allow.
        """
        reader = tested.spec.latent_shape
        for size in (usual_size(tested.spec), *least_sizes(tested.spec)):
            given = inputs(tested.spec, size)
            units = unit_values(tested.pipeline, given)
            values = dict(given)
            for made in units.values():
                values |= made
            reads = {name: values[name] for name in reader.inputs if name in values}
            shape = reader.function(**reads, **tested.pipeline.bind_components(reader))
            encoded = tuple(values["input_latents"].shape)
            assert encoded == tuple(shape), (
                f"at {size}: encoded as {encoded}, `latent_shape` is {tuple(shape)}; "
                "is a column's `multiple` or `frame_multiple` not the VAE's?"
            )

    def test_plans_are_the_golden_ones(self, tested: FamilyUnderTest) -> None:
        """What each stage runs, loads and caches changes only on purpose."""
        texts = plan_texts(tested.family, tested.spec)
        golden = {}
        for name in texts:
            path = self.folder / FOLDER / name
            if path.is_file():
                golden[name] = path.read_text("utf-8")
        assert golden == texts, self.advice

    def test_units_make_what_they_made(self, tested: FamilyUnderTest) -> None:
        """What units compute at toy sizes changes only on purpose."""
        before = read_fingerprints(self.folder)
        now = unit_fingerprints(tested.spec, tested.values)
        assert changed(before, now, tested.variant) == [], self.advice

    def test_lora_targets_match_layers(self, tested: FamilyUnderTest) -> None:
        """Each LoRA target matches a layer in every network of the variant that has
        targets.
        """
        pipeline = tested.open()
        for name, targets in tested.family.lora_targets.items():
            network = pipeline.components.get(name)
            if isinstance(network, nn.Module):
                lora_config = LoraConfig(name, targets, 1, 1.0)
                counts = inject(network, lora_config, tested.family.lora_aliases)
                assert all(counts.values())

    def test_modulation_is_of_layers_that_scale_others(
        self, tested: FamilyUnderTest
    ) -> None:
        """Each pattern of the denoiser's `modulation` matches layers, all of which make at
        least a scale and a shift of each channel; of another network one pattern does, since
        it may lack blocks in one variant that it has in another.
        """
        for component in tested.family.load("components"):
            network = tested.pipeline.components.get(component.name)
            if not isinstance(network, nn.Module):
                continue
            patterns = component.modulation
            is_denoiser = component.name == tested.family.default_trainable
            for part in [[one] for one in patterns] if is_denoiser else [patterns]:
                found = [
                    layer
                    for name, layer in network.named_modules()
                    if isinstance(layer, nn.Linear)
                    and any(fnmatchcase(f".{name}", f"*.{one}") for one in part)
                ]
                what = f"{component.name}: {', '.join(part)} matches no linear layer"
                assert found or not part, what
                assert all(one.out_features >= 2 * one.in_features for one in found)


def _contents(folder: Path) -> dict[str, str]:
    """Return the digests of a folder's files.

    Where files differ, pytest computes the difference of the bytes if the environment has
    `CI`, which takes hours.
    """
    return {
        str(path.relative_to(folder)): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
