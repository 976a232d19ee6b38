"""Fill the layers in training from those of a file."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from dstrain.console import number_of
from dstrain.errors import StateError, first_few
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import Layer, LokrLayer


@torch.no_grad()
def load_layers(
    own: Mapping[str, Layer],
    layers: Mapping[str, Layer],
    path: Path,
    optional_layers: Collection[str] = (),
) -> None:
    """Fill the layers that `inject` added.

    Raises StateError unless names, ranks and alphas are those in training.

    Args:
        own: The layers in training, which share memory with the network.
        layers: The layers to copy from, by the module's own names.
        path: The file that the layers are from.
        optional_layers: Layers that no loss reaches: the file may lack them, and may
            have others if these have no effect.
    """
    for name, layer in layers.items():
        if name in own:
            _check_type(layer, own[name], path)
            _check_numbers(name, layer, own, path)
    trained = own.keys()
    untrained = [
        name
        for name in sorted(layers.keys() - trained)
        if name not in optional_layers or layers[name].acts
    ]
    absent = sorted(trained - layers.keys() - set(optional_layers))
    lines = []
    for difference, names in (
        ("in the file but not trained", untrained),
        ("trained but not in the file", absent),
    ):
        if names:
            lines.append(
                f"{number_of(len(names), 'layer')} {difference}: {first_few(names)}"
            )
    if lines:
        advice = "--lora_target_modules chooses the layers to train"
        what = f"does not fit: it has LoRA on {number_of(len(layers), 'layer')}, but {len(trained)} are trained"
        raise StateError(path, what, *lines, advice)
    for name in trained & layers.keys():
        fill(own[name], layers[name])


def fill(own: Layer, layer: Layer) -> None:
    """Copy a layer into the memory of another one of its type and shapes."""
    if isinstance(own, LokrLayer) and isinstance(layer, LokrLayer):
        parts = layer.with_scale(own.scale).parts()
        for name, matrix in own.parts().items():
            matrix.copy_(parts[name])
        return
    assert isinstance(own, LoraLayer) and isinstance(layer, LoraLayer)
    own.down.copy_(layer.down)
    own.up.copy_(layer.up)
    if own.magnitude is not None and layer.magnitude is not None:
        own.magnitude.copy_(layer.magnitude)


def _check_type(layer: Layer, trained: Layer, path: Path) -> None:
    """Refuse LoRA where DoRA is trained, and the other way round."""
    if layer.type != trained.type:
        what = f"contains {layer.type}, but the LoRA layers to train are {trained.type}"
        raise StateError(path, what, f"give --lora_type {layer.type}")


def _check_numbers(
    name: str,
    layer: Layer,
    trained: Mapping[str, Layer],
    path: Path,
) -> None:
    """Refuse a layer with another rank or alpha than the one in training, or of LoKr
    with other shapes, of which rank and factor are not the only cause.
    """
    own = trained[name]
    if isinstance(layer, LokrLayer) and isinstance(own, LokrLayer):
        have, wanted = (_shapes(one) for one in (layer, own))
        if have != wanted:
            what = f"has LoKr of {name} in matrices of shapes {have}, but {wanted} are to be trained"
            raise StateError(path, what, "--lora_rank and --lokr_factor choose them")
        return
    for number in ("rank", "alpha"):
        have = getattr(layer, number)
        wanted = getattr(trained[name], number)
        # Files store alpha in fp32.
        if math.isclose(have, wanted, rel_tol=1e-6):
            continue
        if len({getattr(one, number) for one in trained.values()}) == 1:
            what = (
                f"has {number} {have:g}, but the LoRA layers to train have {wanted:g}"
            )
            raise StateError(path, what, f"give --lora_{number} {have:g}")
        what = (
            f"has {number} {have:g} of {name}, which is to be trained with {wanted:g}"
        )
        advice = f"--lora_{number} chooses it, for some layers as PATTERN=NUMBER"
        raise StateError(path, what, advice)


def _shapes(layer: LokrLayer) -> str:
    return ", ".join(str(tuple(one.shape)) for one in layer.parts().values())
