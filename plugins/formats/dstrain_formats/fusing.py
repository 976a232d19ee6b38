"""Join layers of the network that a file has as one, and split them again."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from dstrain.plugin import UsageError
from dstrain.plugin.lora import Layer, LoraLayer, Rows
from torch import Tensor

from dstrain_formats.lora_types.dora import lengths_of, lora_layer
from dstrain_formats.lora_types.loha import LohaLayer
from dstrain_formats.lora_types.lokr import LokrLayer


def joined(layers: Mapping[str, Layer], rows: tuple[Rows, ...]) -> Layer:
    """Return the one layer of a file that stands for one or several of the network,
    with its scale as part of its matrices; raises UsageError for several that cannot be
    one exactly.
    """
    first = layers[next(one.layer for one in rows if one.layer in layers)]
    if not isinstance(first, LoraLayer):
        refuse_parts(layers, rows, first.type)
        return first.folded()
    pairs = {name: one for name, one in layers.items() if isinstance(one, LoraLayer)}
    return fuse(pairs, rows)


def divided(layer: Layer, rows: tuple[Rows, ...]) -> dict[str, Layer]:
    """Split a layer of a file into those of the network that it stands for; a LoKr
    stands for one.
    """
    if isinstance(layer, LoraLayer):
        return dict(split_fused(layer, rows))
    return {rows[0].layer: layer}


@dataclass(frozen=True)
class MergedLayer:
    """A change of one layer's weight that can only be merged into it."""

    type: str
    """What it is, for errors."""
    change: Callable[[], Tensor]
    """Computes what is added to the weight, in fp32."""

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        return weight + self.change().to(weight.device)


def merged_parts(
    layer: LohaLayer | LokrLayer, rows: tuple[Rows, ...]
) -> dict[str, MergedLayer]:
    """Return what a layer of a file changes of those of the network that it stands for:
    nothing but rows of a product, and none of them is such a product itself.
    """
    what = "LoHa" if isinstance(layer, LohaLayer) else "LoKr"
    kind = f"{what} of several layers at once"
    numbers = torch.arange(max(one.stop for one in rows))
    found = {}
    for name in dict.fromkeys(one.layer for one in rows):
        change = partial(_rows_of_change, layer, _own_rows(numbers, name, rows))
        found[f"{name}.weight"] = MergedLayer(kind, change)
    return found


def _rows_of_change(layer: LohaLayer | LokrLayer, chosen: Tensor) -> Tensor:
    """Return rows of what is added to a weight."""
    if isinstance(layer, LohaLayer):
        return layer.rows(chosen).change()
    return layer.change()[chosen]


def fuse(layers: Mapping[str, LoraLayer], rows: tuple[Rows, ...]) -> LoraLayer:
    """Return the one layer of a file that stands for one or several of the network,
    with alpha / rank as part of `up`; raises UsageError for DoRA of some of them.

    Several are joined exactly, block by block: of n layers of rank r it has rank n r. A
    layer without LoRA has no block, and those with the same `down`, as the parts of a
    file's one layer have, share one: it comes back with its own rank.
    """
    parts = {
        one.layer: layers[one.layer].folded() for one in rows if one.layer in layers
    }
    if len(rows) == 1:
        return parts[rows[0].layer]
    height = max(one.stop for one in rows)
    downs: list[Tensor] = []
    blocks: list[Tensor] = []
    for name, layer in parts.items():
        shared = [i for i, down in enumerate(downs) if _same(down, layer.down)]
        if shared:
            block = blocks[shared[0]]
        else:
            block = layer.up.new_zeros(height, *layer.up.shape[1:])
            downs.append(layer.down)
            blocks.append(block)
        for one in rows:
            if one.layer == name:
                part = layer.up[one.offset :][: one.stop - one.start]
                block[one.start : one.stop] = part
    down = torch.cat(downs)
    up = torch.cat(blocks, 1)
    if all(lengths_of(layer) is None for layer in parts.values()):
        return LoraLayer(down, up, float(len(down)))
    refuse_parts(layers, rows, "dora")
    lengths = down.new_empty(height)
    for one in rows:
        own = lengths_of(layers[one.layer])
        assert own is not None
        lengths[one.start : one.stop] = own[one.offset :][: one.stop - one.start]
    return lora_layer(down, up, float(len(down)), lengths)


def _same(one: Tensor, other: Tensor) -> bool:
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return is_alike and torch.equal(one, other)


def refuse_parts(names: Container[str], rows: tuple[Rows, ...], lora_type: str) -> None:
    """Raise UsageError for a layer of a program that stands for several of the network
    of which only some have DoRA, since nothing says what lengths the rows of the others
    have, or of which any has LoKr or LoHa: no such product is several at once.
    """
    every = dict.fromkeys(one.layer for one in rows)
    if lora_type not in ("lora", "dora"):
        if len(rows) > 1 and any(name in names for name in every):
            what = f"the program has one layer for {', '.join(every)}"
            advice = f"no {lora_type} of it is one of each of these; give diffusers"
            raise UsageError("--lora_format", what, advice)
        return
    absent = [name for name in every if name not in names]
    if absent and len(absent) < len(every):
        what = f"the program has one layer for {', '.join(every)}, not all with DoRA"
        raise UsageError("--lora_format", what, f"without it: {', '.join(absent)}")


def split_fused(layer: LoraLayer, rows: tuple[Rows, ...]) -> dict[str, LoraLayer]:
    """Split a layer of a file exactly into those of the network that it stands for:
    each has the same `down`, and its own rows of `up`.

    If every column of `up` acts on one of them alone, which is how `fuse` writes
    several as one, each gets its own columns back.
    """
    if len(rows) == 1:
        return {rows[0].layer: layer}
    names = [one.layer for one in sorted(rows, key=lambda one: one.offset)]
    ups = {name: _own_rows(layer.up, name, rows) for name in names}
    columns = {name: up.flatten(1).bool().any(0) for name, up in ups.items()}
    users = torch.stack(list(columns.values())).sum(0)
    if len(ups) == 1 or users.max() != 1:
        columns = dict.fromkeys(ups, torch.ones_like(users, dtype=torch.bool))
    layers = {}
    for name, used in columns.items():
        lengths = None
        all_lengths = lengths_of(layer)
        if all_lengths is not None:
            lengths = _own_rows(all_lengths, name, rows)
            if not used.any():
                # Its lengths change it nevertheless.
                used = next((one for one in columns.values() if one.any()), ~used)
        rank = int(used.sum())
        if rank:
            alpha = layer.alpha * (rank / layer.rank)
            up = ups[name][:, used]
            layers[name] = lora_layer(layer.down[used], up, alpha, lengths)
    return layers


def _own_rows(fused: Tensor, layer: str, rows: tuple[Rows, ...]) -> Tensor:
    """Return the rows of one of the network's layers, in its order."""
    own = sorted(
        (one for one in rows if one.layer == layer), key=lambda one: one.offset
    )
    return torch.cat([fused[one.start : one.stop] for one in own])
