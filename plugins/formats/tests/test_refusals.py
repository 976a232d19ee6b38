"""What loads silently wrong, or silently not at all, elsewhere: refused here by the
name of its cause.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError
from torch import Tensor

from tests.support.lora_family import (
    Change,
    Header,
    Tensors,
    adapter,
    as_trained,
    read,
    with_alpha,
    written,
)

META = "lora_adapter_metadata"
ONE, PART, NAN = torch.ones(1), "transformer.blocks.0.attn.to_q.", float("nan")


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {key.replace(old, new): one for key, one in tensors.items()}


def alpha_and(change: Change) -> Change:
    return lambda tensors: change(with_alpha(tensors))


def plus(**more: Tensor) -> Change:
    """With more keys of one layer."""
    return lambda tensors: tensors | {PART + key: one for key, one in more.items()}


def without(part: str) -> Change:
    return lambda tensors: {k: one for k, one in tensors.items() if part not in k}


def changed(part: str, change: Any) -> Change:
    """With other numbers where a key contains this."""
    return lambda tensors: {
        key: change(one) if part in key else one for key, one in tensors.items()
    }


def with_lengths(*shape: int, number: float = 1.0) -> Change:
    """DoRA on every layer."""

    def change(tensors: Tensors) -> Tensors:
        names = [key.replace("lora_A.weight", "dora_scale") for key in tensors]
        scales = {name: torch.full(shape, number) for name in names if "dora" in name}
        return tensors | scales

    return change


def instead(parts: Tensors, **others: Tensor | None) -> Change:
    """A file of one layer of these matrices, some of them others."""
    own = {**parts, **others}
    return lambda _: {PART + name: one for name, one in own.items() if one is not None}


LOKR = {"lokr_w1": torch.ones(2, 3), "lokr_w2": torch.ones(3, 2)}
LOHA = {f"hada_w{n}_a": torch.ones(6, 2) for n in "12"}
LOHA |= {f"hada_w{n}_b": torch.ones(2, 6) for n in "12"}
LOHA["alpha"] = torch.tensor(3.0)


def refused() -> Iterator[tuple[str, Change, Header, str]]:
    """What it is, how a good file becomes it, the header, and what the error names."""
    own = adapter()
    yield "alpha lost", dict, {}, "@alpha=rank"
    yield "alpha lost, no prefix", renamed("transformer.", ""), {}, "@alpha=rank"
    peft = renamed("transformer.", "base_model.model.")
    yield "alpha lost, peft", peft, {}, r"adapter_config\.json(?s:.*)@alpha=rank"
    lost = alpha_and(without("1.attn.to_q.alpha"))
    yield "alpha of one layer lost", lost, {}, r"1\.attn\.to_q$"
    twice = "rank 4 and alpha 6 (?s:.*)alpha 3"
    yield "alpha twice, unlike", lambda t: with_alpha(t, 3.0), own, twice
    key = r"\.to_q\.alpha "
    yield "alpha is no number", lambda t: with_alpha(t, NAN), {}, key
    alphas = alpha_and(changed("alpha", lambda one: one.repeat(2)))
    yield "several alphas", alphas, {}, key
    key = r"\.to_q\.lora_[AB]\.weight "
    yield "numbers that are none", changed("lora_", Tensor.log), own, key
    yield "whole numbers", changed("lora_", Tensor.int), own, key
    yield "no rows", changed("lora_", lambda one: one[:0]), own, key
    yield "vectors", changed("lora_", Tensor.flatten), own, "2 of 2 .*matrix lora_A"
    rank = "rank 8 and alpha 6 .* rank 4"
    yield "rank unlike the header's", dict, adapter(r=8), rank
    half = r"1 .*\n.*: blocks\.1\.attn\.to_q"
    yield "half a file by its header", without("blocks.1"), own, half
    yield (
        "half a pair",
        without("1.attn.to_q.lora_B"),
        own,
        r"1 of 2 .*\n.*to_q .*A.weight$",
    )
    yield "a pair twice", plus(**{"lora_down.weight": ONE}), own, "to_q.lora_down"
    yield "an unknown prefix", renamed("transformer.", "unet."), own, "2 of its 2 .*dit"
    name = r": transformer\.blocks\.0\.attn\.to_w, "
    yield "an unknown layer", renamed("to_q", "to_w"), own, name
    many = renamed("blocks.1", "blocks.9")
    yield "one block too many", many, own, r"1 of its 2 .*\n.*blocks\.9"
    peft = alpha_and(renamed("transf", "base_model.model.unet"))
    yield "peft that matches nothing", peft, {}, "2 of its 2 .*dit"
    both = alpha_and(renamed("transformer.blocks.1", "diffusion_model.blocks.1"))
    yield "two namings in one", both, {}, "dit"
    one = plus(dora_scale=torch.ones(6, 1))
    yield "DoRA of one layer", one, own, r"1 of 2 (?s:.*)blocks\.1\.attn\.to_q$"
    yield "DoRA of columns", with_lengths(1, 6), own, r" 6 .* \(1, 6\)"
    yield "DoRA of other rows", with_lengths(5), own, r" 6 .* \(5,\)"
    key = r"\.to_q\.lora_magnitude_vector "
    yield "DoRA without numbers", with_lengths(6, number=NAN), own, key
    yield "half a LoHa beside LoRA", plus(hada_w1_a=ONE[None]), own, "hada_w1_a"
    yield "half a LoKr beside LoRA", plus(lokr_w1=ONE[None]), own, "lokr_w1"
    shape = r"blocks\.0\.attn\.to_q\.diff .*\(1,\), .*to_q\.weight \(6, 6\)"
    yield "a difference of another shape", plus(diff=ONE), own, shape
    yield "a difference of NaN", plus(diff=torch.eye(2).log()), own, r"to_q\.diff "
    yield "a difference of whole numbers", plus(diff=ONE.int()), own, r"to_q\.diff "
    yield "a difference of nothing", plus(diff_m=ONE), own, "1 of its 3 .*dit"
    for key in ("lora_mid.weight", "lora_B.bias", "other", "hada", "lora_a"):
        yield key, plus(**{key: ONE}), own, rf"1 of its 5 .*\n.*: {PART}{key}"
    bare = renamed("lora_A.", "")
    yield "no LoRA", lambda t: bare(without("lora_B")(t)), {}, "2 of its 2 "
    yield "nothing", lambda _: {}, {"a": "b"}, "0 of its 0 "
    yield "an alpha alone", lambda _: {PART + "alpha": ONE}, {}, r"\.to_q\.alpha$"
    wide = changed("lora_A", lambda _: torch.ones(4, 7))
    shapes = r"dit: blocks\.0\.attn\.to_q .*\(4, 7\) .*\(6, 4\).*\(6, 6\)"
    yield "another shape", wide, own, shapes
    narrow = changed("lora_B", lambda one: one[:, :3])
    yield "another rank of one half", narrow, own, r"\(4, 6\) .*\(6, 3\)"
    tall = changed("lora_B", lambda one: one.repeat(2, 1))
    yield "too many rows", tall, own, r"\(4, 6\) .*\(12, 4\)"
    yield "another family", dict, {**own, "family": "other"}, "other.*fused"
    for field, value in {"use_rslora": True, "bias": "all", "something": 1}.items():
        yield field, dict, adapter(**{field: value}), field
    dora = adapter(use_dora=True)
    yield "DoRA in the header alone", dict, dora, "use_dora"
    both = adapter(use_dora=True, use_rslora=True)
    yield "DoRA and rslora in the header", dict, both, "use_rslora,"
    for text in (
        "no",
        "[]",
        "[" * 100_000,
        '{"transformer.lora_alpha": 4}',
        '{"unet.r": 4, "unet.lora_alpha": 1}',
    ):
        yield f"the header {text[:20]}", dict, {META: text}, f"'{META}'"
    yield "a header of no rank", dict, adapter(r=0), f"'{META}'"
    parts: dict[str, Tensor | None]
    for parts, word in (
        ({"lokr_w2": None}, "lokr_w2"),
        ({"lokr_w2_a": torch.ones(4, 1)}, "lokr_w2"),
        ({"lokr_t2": torch.ones(4, 1)}, r"1 of its 3 .*\n.*lokr_t2"),
        ({"dora_scale": torch.ones(6, 1)}, r"1 of 1 .*several types"),
        ({"lokr_w1": torch.eye(2, 3).log()}, r"\.lokr_w1 "),
        ({"lokr_w2": torch.ones(0, 2)}, r"\.lokr_w2 "),
        ({"lokr_w1": torch.ones(2, 3, 1)}, r"\(2, 3, 1\)"),
        ({"lokr_w1": torch.ones(3, 3)}, r"\(3, 3\) .*\(3, 2\).*\(6, 6\)"),
        ({"alpha": torch.ones(2)}, r"\.alpha "),
        (
            {"lokr_w2": None, "lokr_w2_a": ONE[None], "lokr_w2_b": torch.ones(2, 2)},
            r"\(1, 1\) .*\(2, 2\)",
        ),
    ):
        yield f"LoKr with {list(parts)}, {word}", instead(LOKR, **parts), {}, word
    for parts, word in (
        ({"hada_w2_b": None}, "to_q .*hada_w2_a$"),
        ({"hada_w1_b": torch.ones(3, 6)}, "to_q "),
        ({"hada_w2_a": torch.ones(7, 2)}, "to_q "),
        ({"hada_w2_a": torch.ones(6, 2) / 0}, r"\.hada_w2_a "),
        ({"alpha": torch.ones(2)}, r"\.alpha "),
        ({"hada_t1": torch.ones(6, 2)}, r"1 of its 6 .*\n.*hada_t1"),
        ({"dora_scale": torch.ones(6, 1)}, r"1 of 1 .*several types"),
        ({name: torch.ones(5, 2) for name in ("hada_w1_a", "hada_w2_a")}, r"\(5, 2\)"),
    ):
        yield f"LoHa with {list(parts)}, {word}", instead(LOHA, **parts), {}, word


@pytest.mark.parametrize(
    ("change", "header", "match"),
    [pytest.param(*row[1:], id=row[0]) for row in refused()],
)
def test_what_would_be_silently_wrong_is_refused_by_name(
    change: Change, header: Header, match: str, tmp_path: Path
) -> None:
    tensors = change(as_trained(LoraConfig("dit", ("to_q",), 4, 6.0)))
    path = written(tmp_path / "x.safetensors", tensors, header)
    with pytest.raises(
        StateError, match=rf"(?m)x\.safetensors: (.*\n)*?.*{match}"
    ) as e:
        read(path)
    assert e.value.where == str(path)
    assert len(e.value.help_lines) <= 4
