"""Blocks are compiled once for all, where they are; they compute the same, and what cannot
be compiled is said.
"""

import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.models.execution import enable_checkpointing
from dstrain_memory.compilation import compile_blocks
from torch import Tensor, nn

from tests.support.family import Dit

CPU = torch.device("cpu")


class Compiler:
    """Counts what is compiled, and computes it as it is, unless it has a fault."""

    graphs = 0
    fault = ""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        if self.fault:
            raise ValueError(self.fault)
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    torch._dynamo.reset()
    made = Compiler()
    monkeypatch.setattr("dstrain_memory.compilation.BACKEND", made)
    with torch._dynamo.config.patch(recompile_limit=8):
        yield made


def network(depth: int = 3) -> Dit:
    torch.manual_seed(0)
    made = Dit(8, depth).train()
    enable_checkpointing("dit", made, offload=False)
    return made


def numbers(dit: nn.Module, tokens: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 1, tokens, generator=generator)
    text = torch.randn(1, 3, 8, generator=generator)
    mask = torch.ones(1, 3, dtype=torch.bool)
    out: Tensor = dit(latents, torch.ones(1), text, mask)
    out.square().mean().backward()
    found = {"out": out.detach()}
    for name, parameter in dit.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


def test_blocks_are_compiled_once_for_all_and_keep_their_names(
    compiler: Compiler,
) -> None:
    plain, compiled = network(6), network(6)
    names = list(compiled.state_dict())
    compile_blocks({"dit": compiled}, CPU)
    assert compiler.graphs == 0
    wanted, found = numbers(plain), numbers(compiled)
    # The text that the first block gets has no gradient.
    assert compiler.graphs == 2
    assert list(compiled.state_dict()) == names
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    for tokens in range(5, 9):
        numbers(compiled, tokens)
    # Once more, for any number of tokens.
    assert compiler.graphs == 2 * 2
    assert torch._dynamo.config.recompile_limit == 64


def test_a_check_compiles_nothing(compiler: Compiler) -> None:
    dit = network()
    compile_blocks({"dit": dit}, CPU, check_only=True)
    numbers(dit)
    assert compiler.graphs == 0
    with torch._dynamo.config.patch(recompile_limit=100):
        compile_blocks({"dit": dit}, CPU)
        assert torch._dynamo.config.recompile_limit == 100  # a user's own
    others = {"vae": nn.Linear(1, 1), "text_encoder": nn.Linear(1, 1)}
    with pytest.raises(UsageError, match=r"--compile: .* vae, text_encoder"):
        compile_blocks(others, CPU, True)


def test_what_cannot_be_compiled_is_said(compiler: Compiler) -> None:
    compiler.fault = "no compiler\nwas found"
    dit = network()
    compile_blocks({"dit": dit}, CPU)
    with pytest.raises(UsageError, match=r"--compile: dit\.blocks\.0 \(Block\)") as one:
        numbers(dit)
    assert "no compiler" in str(one.value) and "was found" not in str(one.value)


def test_a_compiler_that_is_not_there_is_named_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(device: str, words: str) -> None:
        with pytest.raises(UsageError, match=f"--compile: (?s:.*){words}"):
            compile_blocks({"dit": network()}, torch.device(device), check_only=True)

    own = tmp_path / "cxx"
    monkeypatch.setenv("CXX", str(own))
    check("cpu", rf"{own} .*\n.* CXX ")
    own.touch(mode=0o700)
    compile_blocks({"dit": network()}, CPU, check_only=True)
    monkeypatch.setitem(sys.modules, "triton", None)
    check("cuda", "pip install triton")
    there = types.ModuleType("triton")
    there.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", there)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    check("cuda", r"gcc or clang .*\n.* CC ")
    (tmp_path / "clang").touch(mode=0o700)
    compile_blocks({"dit": network()}, torch.device("cuda"), check_only=True)
