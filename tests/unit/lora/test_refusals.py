"""What loads silently wrong, or silently not at all, elsewhere: refused here by the
name of its cause.
"""

from pathlib import Path

import pytest
import torch
from dstrain import LoraConfig, StateError
from safetensors.torch import load_file
from torch import Tensor

from tests.support.lora_family import (
    Change,
    Header,
    adapter,
    ours,
    read,
    with_alpha,
    written,
)


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {
        key.replace(old, new): value for key, value in tensors.items()
    }


def plus(**more: Tensor) -> Change:
    return lambda tensors: (
        tensors
        | {
            f"transformer.blocks.0.attn.to_q.{key}": value
            for key, value in more.items()
        }
    )


def without(part: str) -> Change:
    return lambda tensors: {
        key: value for key, value in tensors.items() if part not in key
    }


def with_lengths(*shape: int, number: float = 1.0) -> Change:
    """DoRA on every layer."""
    return lambda tensors: (
        tensors
        | {
            key.replace("lora_A.weight", "dora_scale"): torch.full(shape, number)
            for key in tensors
            if "lora_A" in key
        }
    )


ONE = torch.ones(1)
META = "lora_adapter_metadata"
MIXED = "diffusion_model.blocks.1"
REFUSED: tuple[tuple[str, Change, Header, str], ...] = (
    ("alpha lost", dict, {}, "has neither .* nor 'lora_adapter_metadata' in its header, so rank and alpha are unk"),
    ("alpha lost, no prefix", renamed("transformer.", ""), {}, "so rank and alpha are unknown"),
    ("alpha lost, peft", renamed("transformer.", "base_model.model."), {}, "adapter_config.json beside it .* so rank"),
    ("alpha of one layer lost", lambda t: without("1.attn.to_q.alpha")(with_alpha(t)), {}, "2 layers lack .* alpha"),
    ("alpha twice, unlike", lambda t: with_alpha(t, 3.0), adapter(), "says rank 4 and alpha 6 .* and alpha 3"),
    ("alpha is no number", lambda t: with_alpha(t, float("nan")), {}, "alpha is not a finite number"),
    ("alphas", lambda t: {k: v.repeat(2) if "al" in k else v for k, v in with_alpha(t).items()}, {}, "not a finite n"),
    ("numbers that are none", lambda t: {k: v / 0 for k, v in t.items()}, adapter(), "is not a finite matrix"),
    ("whole numbers", lambda t: {k: v.int() for k, v in t.items()}, adapter(), "is not a finite matrix"),
    ("an infinite alpha", dict, adapter(lora_alpha=float("inf")), "no valid rank and alpha"),
    ("a header too deep", dict, {META: "[" * 100_000}, "no valid rank and alpha"),
    ("rank unlike the header's", dict, adapter(r=8), "says rank 8 and alpha 6 of blocks.* has rank 4"),
    ("half a file by its header", without("blocks.1"), adapter(), r"1 layer that its header.*\n.*blocks\.1\.attn"),
    ("half a pair", without("1.attn.to_q.lora_B"), adapter(),
     r"incomplete LoRA file: 1 of 2 layers lack lora_A, lora_B or an alpha\n.*to_q has only A"),
    ("an unknown prefix", renamed("transformer.", "unet."), adapter(), r"2 of its 2 layers match no naming of dit"),
    ("an unknown layer", renamed("to_q", "to_w"), adapter(), r"transformer\.blocks\.0\.attn\.to_w.*\n.*known: proj_in"),
    ("one block too many", renamed("blocks.1", "blocks.9"), adapter(), r"1 of its 2 layers.*\n.*blocks\.9"),
    ("peft that matches nothing", lambda t: with_alpha(renamed("transf", "base_model.model.unet")(t)), {}, "match no "),
    ("two namings in one", lambda t: with_alpha(renamed("transformer.blocks.1", MIXED)(t)), {}, "two naming schemes"),
    ("DoRA of one layer", plus(dora_scale=torch.ones(6, 1)), adapter(), "1 of 2 layers lack .* the lengths of DoRA"),
    ("DoRA of columns", with_lengths(1, 6), adapter(), r"has 6 rows and the lengths of DoRA of shape \(1, 6\)"),
    ("DoRA of other rows", with_lengths(5), adapter(), r"has 6 rows and the lengths of DoRA of shape \(5,\)"),
    ("DoRA without numbers", with_lengths(6, number=float("nan")), adapter(), "not a finite vector of numbers"),
    ("half a LoHa", plus(hada_w1_a=ONE[None]), adapter(), "incomplete LoRA file: .* has only hada_w1_a"),
    ("half a LoKr beside LoRA", plus(lokr_w1=ONE[None]), adapter(), "without all of lokr_w2"),
    ("a difference of another shape", plus(diff=ONE), adapter(), r"a difference of .* of shape .*, but it is \(6, 6\)"),
    ("a difference that is no number", plus(diff=ONE / 0), adapter(), "diff is not an array of finite numbers"),
    ("a difference of nothing", plus(diff_m=ONE), adapter(), "1 of its 3 layers match no naming of dit"),
    ("Tucker", lambda t: t | {"transformer.blocks.0.attn.to_q.lora_mid.weight": ONE}, adapter(), "of no LoRA layer"),
    ("biases", lambda t: t | {"transformer.blocks.0.attn.to_q.lora_B.bias": ONE}, adapter(), "of no LoRA layer"),
    ("something else", plus(other=ONE), adapter(), r"1 of its 5 keys are of no LoRA layer\n  the first: transf"),
    ("no LoRA", lambda t: {"blocks.0.attn.to_q.weight": ONE}, {}, "1 of its 1 keys are of no LoRA layer"),
    ("nothing", lambda t: {}, {"a": "b"}, "it has no keys"),
    ("another shape", lambda t: {k: torch.ones(4, 7) if "lora_A" in k else v for k, v in t.items()}, adapter(),
     r"does not fit dit: blocks\.0\.attn\.to_q has matrices of shapes \(4, 7\) and \(6, 4\), for .*\(6, 6\)"),
    ("another rank of one half", lambda t: {k: v[:, :3] if "lora_B" in k else v for k, v in t.items()}, adapter(),
     r"has matrices of different ranks: \(4, 6\) and \(6, 3\)"),
    ("too many rows", lambda t: {k: v.repeat(2, 1) if "lora_B" in k else v for k, v in t.items()}, adapter(),
     r"does not fit dit: blocks\.0\.attn\.to_q has matrices of shapes \(4, 6\) and \(12, 4\)"),
    ("vectors", lambda t: {k: v.flatten() for k, v in t.items()}, adapter(), "is not a finite matrix"),
    ("another family", dict, {**adapter(), "family": "other"}, "is a LoRA for family other, not for fused"),
    ("rslora", dict, adapter(use_rslora=True), "needs use_rslora, which is not supported"),
    ("DoRA in the header", dict, adapter(use_dora=True), "says that it is DoRA, but no key has lengths of rows"),
    ("bias in the header", dict, adapter(bias="all"), "needs bias, which is not supported"),
    ("something new in the header", dict, adapter(something=1), "needs something, which is not supported"),
    ("a header that is no JSON", dict, {META: "no"}, "no valid rank and alpha for 'transformer.'"),
    ("a header that is a list", dict, {META: "[]"}, "no valid rank and alpha"),
    ("a header without rank", dict, {META: '{"transformer.lora_alpha": 4}'}, "no valid rank and alpha"),
    ("a header of rank 0", dict, adapter(r=0), "no valid rank and alpha"),
    ("a header of another prefix", dict, {META: '{"unet.r": 4, "unet.lora_alpha": 1}'}, "no valid rank"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "header", "match"),
    [row[1:] for row in REFUSED],
    ids=[row[0] for row in REFUSED],
)
def test_what_would_be_silently_wrong_is_refused_by_name(
    change: Change, header: Header, match: str, tmp_path: Path
) -> None:
    path, _ = ours(tmp_path, LoraConfig("dit", ("to_q",), 4, 6.0))
    changed = written(tmp_path / "x.safetensors", change(load_file(path)), header)
    with pytest.raises(StateError, match=match) as caught:
        read(changed)
    assert str(caught.value).startswith(f"dstrain: error: {changed}: ")
    assert len(caught.value.help_lines) <= 3
