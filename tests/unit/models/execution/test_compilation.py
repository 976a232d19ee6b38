"""Blocks are compiled once for all, where they are; they compute the same, and what cannot
be compiled is said.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.models.execution import compilation, compile_blocks, enable_checkpointing
from dstrain.training.offload.block_swap import BlockSwap
from torch import Tensor, nn

from tests.support.family import Dit
from tests.support.poisoned_memory import poisoned_memory

CPU = torch.device("cpu")


class Compiler:
    """Counts what is compiled, and computes it as it is."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """Count a graph."""
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    torch._dynamo.reset()
    made = Compiler()
    monkeypatch.setattr(compilation, "BACKEND", made)
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


def test_samples_of_many_sizes_are_compiled_once_more(compiler: Compiler) -> None:
    compiled = network()
    compile_blocks({"dit": compiled}, CPU)
    for tokens in range(4, 9):
        numbers(compiled, tokens)
    assert compiler.graphs == 2 * 2  # the second is for any number of tokens
    assert torch._dynamo.config.recompile_limit == compilation.RECOMPILATIONS


def test_swapped_blocks_can_be_compiled(compiler: Compiler) -> None:
    plain, compiled = network(), network()
    for one in (plain, compiled):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
    compile_blocks({"dit": compiled}, CPU)
    swap = BlockSwap(CPU)
    swap.add("dit", compiled, 3)
    with poisoned_memory() as seen:
        for _ in range(2):
            wanted, found = numbers(plain), numbers(compiled)
            swap.release()
            for name, value in wanted.items():
                assert torch.equal(found[name], value), name
        assert (seen.most, seen.now) == (2, 0)
    assert compiler.graphs == 2


def test_a_check_compiles_nothing(compiler: Compiler) -> None:
    dit = network()
    compile_blocks({"dit": dit}, CPU, check_only=True)
    numbers(dit)
    assert compiler.graphs == 0
    with pytest.raises(UsageError, match="--compile: has no effect: vae, text_encoder"):
        compile_blocks(
            {"vae": nn.Linear(1, 1), "text_encoder": nn.Linear(1, 1)}, CPU, True
        )


def test_what_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise ValueError("no compiler\nwas found")

    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "BACKEND", fail)
    dit = network()
    compile_blocks({"dit": dit}, CPU)
    with pytest.raises(UsageError) as caught:
        numbers(dit)
    message = str(caught.value)
    assert "dit.blocks.0 (Block) cannot be compiled here: " in message
    assert "no compiler" in message
    assert "was found" not in message


def test_a_compiler_that_is_not_there_is_named_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(device: str) -> str:
        with pytest.raises(UsageError) as caught:
            compile_blocks({"dit": network()}, torch.device(device), check_only=True)
        return str(caught.value)

    own = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(own))
    assert f"--compile: needs a C++ compiler, and {own} is not found" in check("cpu")
    assert "set the variable CXX to the path of yours" in check("cpu")
    own.touch(mode=0o700)
    compile_blocks({"dit": network()}, CPU, check_only=True)
    monkeypatch.setattr(compilation, "find_spec", lambda name: None)
    assert "--compile: needs triton on a GPU, which is not" in check("cuda")
    monkeypatch.setattr(compilation, "find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "and gcc or clang is not found" in check("cuda")
