"""Fill the layers in training from those of a file."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from dstrain.console import number_of
from dstrain.errors import StateError, first_few
from dstrain.lora.layers import Layer
from dstrain.lora.types import type_named


@torch.no_grad()
def load_layers(
    own: Mapping[str, Layer],
    layers: Mapping[str, Layer],
    path: Path,
    optional_layers: Collection[str] = (),
) -> None:
    """Fill the layers that `inject` added.

    Raises StateError unless names, ranks and alphas are those in training; the file may
    lack optional layers, which no loss reaches, and have others if these have no effect.
    """
    for name, layer in layers.items():
        if name in own:
            _check(name, layer, own[name], path)
    trained = own.keys()
    others = sorted(layers.keys() - trained)
    acting = (name for name in others if layers[name].acts)
    untrained = sorted({*others} - {*optional_layers} | {*acting})
    absent = sorted(trained - layers.keys() - set(optional_layers))
    lines = []
    for difference, names in (
        ("in the file but not trained", untrained),
        ("trained but not in the file", absent),
    ):
        if names:
            count = number_of(len(names), "layer")
            lines.append(f"{count} {difference}: {first_few(names)}")
    if lines:
        advice = "--lora_target_modules chooses the layers to train"
        what = f"does not fit: it has LoRA on {number_of(len(layers), 'layer')}, but {len(trained)} are trained"
        raise StateError(path, what, *lines, advice)
    for name in trained & layers.keys():
        type_named(own[name].type).fill(own[name], layers[name])


def _check(name: str, layer: Layer, trained: Layer, path: Path) -> None:
    """Refuse a layer of another type, rank or alpha than the one in training, or of a
    type with shapes of its own with other ones.
    """
    if layer.type != trained.type:
        what = f"contains {layer.type}, but the LoRA layers to train are {trained.type}"
        raise StateError(path, what, f"give --lora_type {layer.type}")
    kind = type_named(layer.type)
    have, wanted = (kind.shapes_of(one) for one in (layer, trained))
    if have != wanted:
        what = f"has {kind.name} of {name} in tensors of shapes {have}, but {wanted} are to be trained"
        raise StateError(path, what, f"{kind.sizes} choose them")
    for number in ("rank", "alpha") if not have else ():
        own, other = (getattr(one, number) for one in (layer, trained))
        # Files store alpha in fp32.
        if not math.isclose(own, other, rel_tol=1e-6):
            what = f"has {number} {own:g} of {name}, to be trained with {other:g}"
            advice = f"give --lora_{number} {own:g}, or PATTERN={own:g} for some layers"
            raise StateError(path, what, advice)
