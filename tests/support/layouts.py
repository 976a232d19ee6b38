"""What published files of a family are compared by: digests of the names and shapes of
weights, networks whose weights differ, and what diffusers and others load.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import ModelConfig
from dstrain.models import NATIVE, component_at, components_of, empty_component
from dstrain.models.configs import infer_config
from dstrain.models.formats import Shape, checkpoint_shapes, shapes_of
from dstrain.plugin import CheckpointFormat, Component, Files, ModelFamily
from safetensors.torch import save_file
from torch import Tensor

from tests.support.toys import opened, toy


def layout_shapes(
    component: Component,
    config: Mapping[str, Any] | Path,
    checkpoint_format: CheckpointFormat = NATIVE,
) -> dict[str, Shape]:
    """Return the name and shape of each tensor that a component has in files of a format;
    tied weights once.

    config: The content of its config.json, or the file.
    """
    if isinstance(config, Path):
        config = json.loads(config.read_bytes())
    network: Any = empty_component(component, config)
    assert network is not None
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    shapes = shapes_of(network.state_dict())
    own = {name: shape for name, shape in shapes.items() if name not in tied}
    return checkpoint_shapes(checkpoint_format, own)


def layout_digest(
    component: Component,
    config: Mapping[str, Any] | Path,
    checkpoint_format: CheckpointFormat = NATIVE,
) -> str:
    """Return the digest of what `layout_shapes` returns."""
    return digest_of(layout_shapes(component, config, checkpoint_format))


Layout = Mapping[str, Any]
"""Name -> the shape of a tensor, or the layout of a dictionary in a file."""


def digest_of(shapes: Layout) -> str:
    """Return the digest of tensors as DiffSynth-Studio lists published files: the md5 of
    all 'NAME:SIDE_SIDE' and 'NAME', sorted and joined by commas.
    """
    return hashlib.md5(_described(shapes).encode()).hexdigest()


def _described(shapes: Layout) -> str:
    """All entries of a file, or of a dictionary in it."""
    entries = []
    for name, shape in shapes.items():
        if isinstance(shape, Mapping):
            entries.append(f"{name}|{_described(shape)}")
        else:
            entries += [f"{name}:{'_'.join(map(str, shape))}", name]
    return ",".join(sorted(entries))


def settings(component: Component, config: Mapping[str, Any]) -> str:
    """Return a component's configuration, with its defaults, as text."""
    return json.dumps(vars(component.configure(config)), default=str)


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert set(one) == set(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def network_of_noise(component: Component, folder: Path, **changes: Any) -> Any:
    """Return the network of a toy's folder, with another configuration, in which no two
    weights are equal, as norms are when they are new.
    """
    content = json.loads((folder / component.folder / "config.json").read_bytes())
    library: Any = component.network
    network = library.build(component.configure({**content, **changes}))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    return network


def load_as(component: Component, files: Files, network: Any) -> Any:
    """Load files into a new network of another one's configuration."""
    config = network.config
    content = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return component.network.load(files, component.configure(content), torch.float32)


def saved(path: Path, weights: Mapping[str, Tensor]) -> Path:
    """Write weights to a file of either kind."""
    tensors = {key: one.detach().contiguous().clone() for key, one in weights.items()}
    torch.save(tensors, path) if path.suffix == ".pth" else save_file(tensors, path)
    return path


def assert_lora_is_loaded_as_said(
    family: ModelFamily, pipeline: Any, *left: str
) -> None:
    """Compare the components whose LoRA a family says that diffusers loads with those that
    its pipeline does, but for some.
    """
    said = {
        prefix
        for name, prefix in family.lora_prefixes.items()
        if all(
            one.is_loaded
            for one in components_of(family)[name].lora
            if one.program == "diffusers"
        )
    }
    assert said == set(pipeline._lora_loadable_modules) - set(left)


class PublishedFiles:
    """What holds for published files of a family; subclasses say which there are."""

    family: ModelFamily
    files: Sequence[tuple[str, str, int | None, str]]
    """Component, model id, number of its format (None for the network's own names), and the
    digest by which DiffSynth-Studio recognizes the file.
    """
    told: Sequence[tuple[str, str]]
    """Components and ids of models whose configuration their weights tell."""
    libraries: Sequence[tuple[str, str, Any]]
    """Variant, component, and the class of its library."""
    places: Sequence[tuple[str, str]] = ()
    """Patterns of files, and whose they are."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give a test each row of what it asks for."""
        for name, rows in (
            ("published", self.files),
            ("told", self.told),
            ("library", self.libraries),
            ("place", self.places),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, rows, ids=lambda row: "-".join(row[:2]))

    def component(self, name: str) -> Component:
        return components_of(self.family)[name]

    def test_a_network_is_that_of_its_published_file(self, published: Any) -> None:
        name, model_id, number, digest = published
        component = self.component(name)
        layout = NATIVE if number is None else component.formats[number]
        assert layout_digest(component, component.published[model_id], layout) == digest

    def test_a_network_is_told_by_its_weights(self, told: Any) -> None:
        """Compare a published configuration with what the shapes of its weights tell."""
        component = self.component(told[0])
        config = component.published[told[1]]
        found = infer_config(component, layout_shapes(component, config))
        assert found is not None
        assert settings(component, found) == settings(component, config)

    @pytest.mark.filterwarnings("default")
    def test_a_network_is_loaded_as_its_library_loads_it(self, library: Any) -> None:
        variant, name, kind = library
        pipe = opened(self.family.name, variant)
        ours, known = pipe.components[name], pipe.configs[name]
        folder = toy(self.family.name, variant) / self.component(name).folder
        theirs = kind.from_pretrained(folder)
        assert not ours.training
        for one, other in (
            (ours.state_dict(), theirs.state_dict()),
            (dict(ours.named_parameters()), dict(theirs.named_parameters())),
            (dict(ours.named_buffers()), dict(theirs.named_buffers())),
        ):
            assert_equal(one, other)
        if hasattr(known, "to_dict"):
            own = ours.config.to_dict()
            assert {**known.to_dict(), "dtype": own["dtype"]} == own
        else:
            own = {k: one for k, one in ours.config.items() if not k.startswith("_")}
            assert vars(known) == own

    def test_a_file_is_told_by_its_place_so_that_a_stage_fetches_only_its_own(
        self, place: Any
    ) -> None:
        pattern, name = place
        known = list(components_of(self.family).values())
        assert component_at(ModelConfig(None, "Any/Any", pattern), known) == name
