"""Divide trained networks among processes: each keeps some rows of every weight.

The sharding is torch's (`fully_shard`): it puts other parameters in the places of a
network's own, tensors of which each process has some rows. A block's weights are put
together while it computes, and its gradients are averaged over the processes as by DDP.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dstrain.distributed.sharding import Sharding
from dstrain.errors import UsageError
from dstrain.models.blocks import repeated_blocks
from dstrain.storage.safetensors import read_rows
from dstrain.training.module import TrainingModule


def shard_networks(
    module: TrainingModule,
    sharding: Sharding,
    device: torch.device,
) -> None:
    """Divide the trained networks that a step uses, block by block; parameters that
    were looked up before are no longer theirs.
    """
    mesh = _mesh(sharding, device)
    on_gpu = device.type != "cpu"
    policy = CPUOffloadPolicy() if sharding.offload and on_gpu else OffloadPolicy()
    for name in module.trained.components:
        network = module.networks[name]
        for part in (*repeated_blocks(network).values(), network):
            # Before the hooks of torch, which see what this one returns.
            part.register_forward_hook(_without_views)
            try:
                fully_shard(
                    part,
                    mesh=mesh,
                    reshard_after_forward=sharding.reshard_after_forward,
                    offload_policy=policy,
                )
            except ValueError as error:
                # It has a weight that is a single number.
                raise UsageError(f"sharding of {name}", str(error)) from error


def _mesh(sharding: Sharding, device: torch.device) -> DeviceMesh:
    """Return the processes as a line, or for hybrid as one line for each machine.

    Raises UsageError for machines with different numbers of processes.
    """
    size = dist.get_world_size()
    if sharding.mode == "full":
        return init_device_mesh(device.type, (size,))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size % local:
        what = f"{size} processes do not make machines of {local} each"
        raise UsageError("hybrid sharding", what, "start equally many on each machine")
    names = ("machine", "process")
    return init_device_mesh(device.type, (size // local, local), mesh_dim_names=names)


def _without_views(part: nn.Module, args: Any, output: Any) -> Any:
    """Copy what is a view: where something is added to one in place, the backward pass
    no longer passes the hook that puts the weights together.
    """
    return tree_map_only(
        Tensor, lambda one: one.clone() if one._is_view() else one, output
    )


def sharded_networks(module: TrainingModule) -> list[FSDPModule]:
    """Return the networks that are divided among processes."""
    networks = module.networks.values()
    return [network for network in networks if isinstance(network, FSDPModule)]


@contextmanager
def keeping_gradients(module: TrainingModule) -> Iterator[None]:
    """Inside, gradients of LoRA layers add up in each process, as in DDP's `no_sync`.

    Those of networks that are trained in full are exchanged each time: whole, they need
    as much memory as all the weights.
    """
    with ExitStack() as stack:
        for name, network in module.networks.items():
            if isinstance(network, FSDPModule) and name in module.trained.lora:
                network.set_requires_gradient_sync(False)
                stack.callback(network.set_requires_gradient_sync, True)
        yield


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return what it was,
    () fp32, equal on all processes.
    """
    grads = [one.grad for one in parameters if isinstance(one.grad, DTensor)]
    if not grads:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    mesh = grads[0].device_mesh
    rows = [grad.to_local() for grad in grads]
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(rows)])
    squares = norms.to(mesh.device_type).square().sum()
    # Every machine has all rows, of which a process has some.
    dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    norm = squares.sqrt()
    # As torch's own, which cannot scale rows that are kept in RAM.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(rows, scale.to(rows[0].device))
    return norm


def read_own_rows(
    path: Path,
    owner_of: Callable[[str], nn.Parameter | None],
) -> dict[str, Tensor]:
    """Read a file's tensors: of each with the shape of the parameter to which it belongs,
    by its name, only the rows that this process has of that, divided in the same way.
    """
    divided: dict[str, DTensor] = {}

    def rows(name: str, shape: list[int]) -> slice | None:
        owner = owner_of(name)
        if not isinstance(owner, DTensor) or list(owner.shape) != shape:
            return None
        divided[name] = owner
        return _own_rows(owner)

    tensors = read_rows(path, rows)
    return tensors | {
        name: _as_divided(tensors[name], owner) for name, owner in divided.items()
    }


def _own_rows(parameter: DTensor) -> slice:
    """Return which rows of a parameter this process has: torch gives each the same
    number, and the last ones what is left.
    """
    mesh = parameter.device_mesh
    of_each = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
    start = min(of_each * mesh.get_local_rank(mesh.ndim - 1), parameter.shape[0])
    return slice(start, start + parameter.to_local().shape[0])


def _as_divided(rows: Tensor, parameter: DTensor) -> DTensor:
    return DTensor.from_local(
        rows.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
