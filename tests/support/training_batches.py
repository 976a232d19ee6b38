"""Batches of a training run, and their gradients."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from dstrain import Batch, SampleKey, TrainingModule
from dstrain.runs.training_run import TrainingRun
from dstrain.training import MicroBatch
from torch import Tensor, nn


def batch(
    ready: TrainingRun,
    rows: Sequence[int],
    weights: Sequence[float] | None = None,
    total: int = 0,
) -> Batch:
    """Return these rows as a batch, of a step of `total` samples."""
    keys = tuple(SampleKey(0, 0, 0, row) for row in rows)
    micro = MicroBatch(
        keys, weights or (1.0,) * len(rows), total or len(rows), ends_step=True
    )
    return Batch(micro, [ready.data.source.sample(row) for row in rows])


def gradients(module: TrainingModule, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the gradients of a step of these batches."""
    module.zero_grad(set_to_none=True)
    for one in batches:
        module(one).backward()
    return {
        name: p.grad.clone()
        for name, p in module.trained.parameters.items()
        if p.grad is not None
    }


def assert_same_gradients(
    ours: tuple[nn.Module, Tensor], theirs: tuple[nn.Module, Tensor]
) -> None:
    """Compare two losses, and the gradients that they give networks with the same names;
    the greatest difference is 1e-4 of the greatest value.
    """
    found, wanted = [], []
    for (network, loss), gradients in ((ours, found), (theirs, wanted)):
        loss.backward()
        gradients += [(name, one.grad) for name, one in network.named_parameters()]
    error, whole = (ours[1] - theirs[1]).detach(), theirs[1].detach()
    assert float(error.abs()) <= 1e-4 * float(whole)
    greatest = max(float(one.abs().max()) for _, one in wanted)
    assert greatest > 0
    for (name, one), (other, own) in zip(wanted, found, strict=True):
        assert name == other
        assert float((own - one).abs().max()) <= 1e-4 * greatest, name


def assert_batch_equals_its_samples(ready: TrainingRun, rows: Sequence[int]) -> None:
    """Compare the losses and gradients of rows in one batch with those of each alone."""
    module = ready.module.eval()
    whole = batch(ready, rows)
    parts = [batch(ready, (row,), total=len(rows)) for row in rows]
    together = module.losses(whole.samples, whole.micro_batch.keys)
    alone = [module.losses(one.samples, one.micro_batch.keys) for one in parts]
    assert (together - torch.cat(alone)).abs().max() <= 1e-6
    one, many = gradients(module, [whole]), gradients(module, parts)
    assert one.keys() == many.keys() == set(module.trained.parameters)
    assert max((one[name] - many[name]).abs().max().item() for name in one) <= 1e-6


def means_of_parts(ready: TrainingRun, rows: Iterable[int]) -> list[float]:
    """The mean loss of these rows in each of the four parts of the timesteps."""
    module = ready.module.eval()
    module.timestep_sampler = module.timestep_sampler.stratified()
    samples = {row: ready.data.source.sample(row) for row in rows}
    return [
        fmean(
            module.losses([sample], [SampleKey(0, -1, part, row)]).item()
            for row, sample in samples.items()
        )
        for part in range(4)
    ]
