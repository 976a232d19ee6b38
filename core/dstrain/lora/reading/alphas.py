"""Find the alpha of each layer of a LoRA file, which many do not state."""

import math
from collections.abc import Mapping
from dataclasses import replace

from dstrain.config import LoraFile
from dstrain.console import get_logger, shell_command, shell_word
from dstrain.errors import StateError, UsageError, first_few
from dstrain.lora.reading.adapter_config import (
    ADAPTER_HEADER,
    AdapterConfig,
    is_folded,
    is_of_ai_toolkit,
)
from dstrain.lora.reading.groups import Group
from dstrain.lora.reading.stored import StoredLayer
from dstrain.storage.files import unused_name

logger = get_logger(__name__)
NO_ALPHA = (
    "has no alpha; using the rank, as DiffSynth-Studio and XLabs do with these names"
)


def alphas_of(
    group: Group,
    file: LoraFile,
    header: Mapping[str, str],
    adapter: AdapterConfig | None,
) -> Mapping[str, float]:
    """Return each layer's alpha; log a warning if it had to be assumed.

    Raises StateError for a file that does not state it, and UsageError for an alpha that
    is given of one that does.

    Args:
        group: The layers.
        file: The file, with the alpha that is given of it.
        header: The file's header.
        adapter: What peft's configuration says.
    """
    ranks = {rest: float(weights.rank) for rest, weights in group.layers.items()}
    # Alpha says nothing of what is no product of a rank, nor that layer of others.
    layers = {rest: one for rest, one in group.layers.items() if one.has_product}
    if layers:
        return {**ranks, **_stated(layers, file, header, adapter, group.peft)}
    if file.alpha is not None:
        raise UsageError("--alpha", f"has no effect: {file.path} needs none")
    return ranks


def _stated(
    layers: Mapping[str, StoredLayer],
    file: LoraFile,
    header: Mapping[str, str],
    adapter: AdapterConfig | None,
    peft: bool,
) -> Mapping[str, float]:
    """Return the alpha of each of these layers, all of which have one.

    peft: As in `Group`.
    """
    ranks = {rest: float(weights.rank) for rest, weights in layers.items()}
    stated = {
        rest: weights.alpha
        for rest, weights in layers.items()
        if weights.alpha is not None
    }
    if adapter is not None:
        for rest, rank in ranks.items():
            header_rank, header_alpha = adapter.of(rest)
            alpha = stated.setdefault(rest, header_alpha)
            is_same = math.isclose(alpha, header_alpha, rel_tol=1e-6)
            if rank != header_rank or not is_same:
                what = f"its header says rank {header_rank} and alpha {header_alpha:g} of {rest}, "
                what += f"which has rank {rank:g} and alpha {alpha:g}"
                raise StateError(file.path, what)
    if is_folded(header):
        stated = stated or ranks
    without = [rest for rest in layers if rest not in stated]
    if stated and without:
        what = f"incomplete LoRA file: {len(without)} of {len(layers)} layers lack an alpha"
        raise StateError(file.path, what, f"the first: {first_few(without)}")
    if stated:
        if file.alpha is not None:
            what = f"has no effect: {file.path} states its own alpha"
            raise UsageError("--alpha", what, "leave it, or @alpha, out")
        return stated
    if file.alpha == "rank":
        return ranks
    if file.alpha is not None:
        return dict.fromkeys(layers, file.alpha)
    if peft or not all(weights.named for weights in layers.values()):
        if is_of_ai_toolkit(header):
            return ranks
        with_alpha = file.path.with_stem(f"{file.path.stem}-alpha")
        paths = (file.path, unused_name(with_alpha))
        typed = shell_word(replace(file, alpha="rank").typed)
        raise StateError(
            file.path,
            "has neither `.alpha` keys nor adapter_config.json beside it "
            f"nor {ADAPTER_HEADER!r} in its header, so rank and alpha are unknown",
            "a wrong alpha makes its effect many times too strong or too weak, without any error; ComfyUI and "
            "diffusers use B A as it is, as if alpha were the rank",
            f"if it is, say so where the file is named ({typed}), or once for all, in a file of its own:",
            shell_command(["dstrain", "export", "--alpha", "rank", *map(str, paths)]),
        )
    # dstrain's own files with these names always had alpha / rank as part of B.
    if not {"family", "alpha"} <= header.keys():
        logger.warning(f"{file.path}: {NO_ALPHA}")
    return ranks
