"""Shard trained networks among processes: each keeps some rows of every weight.

The sharding is torch's (`fully_shard`): it puts other parameters in the places of a
network's own, tensors of which each process has some rows. A block's weights are put
together while it computes, and its gradients are averaged over the processes as by DDP.

Importing torch's takes a second, so only runs that shard do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dstrain.distributed import Sharding
from dstrain.errors import UsageError
from dstrain.models.execution import repeated_blocks
from dstrain.models.placing import put, tied_names
from dstrain.storage.safetensors import read_rows
from dstrain.storage.tensor_writer import is_divided
from dstrain.training.module import TrainingModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Division:
    """The sharding of trained networks among the processes of a run, from when they are
    loaded.
    """

    def __init__(self, sharding: Sharding, device: torch.device) -> None:
        """Arrange the processes, which have met; raises UsageError for machines with
        different numbers of processes.
        """
        self._sharding = sharding
        self._device = device
        self._mesh = _mesh(sharding, device)
        self._checked: set[nn.Module] = set()
        self._rows: dict[int, tuple[nn.Parameter, Tensor]] = {}
        """A parameter's id -> the parameter, and this process's rows of it."""

    def keep_rows(self, network: nn.Module, name: str, stored: Tensor) -> Tensor:
        """Keep this process's rows of a weight that is stored; until `divide`, the
        network's parameter has a shape and no numbers. Raises UsageError for a network
        that cannot be sharded.
        """
        if network not in self._checked:
            self._checked.add(network)
            refuse_single_numbers(network)
        owner, _, own = name.rpartition(".")
        parameter = network.get_submodule(owner)._parameters.get(own)
        if parameter is None or name in tied_names(network) or stored.ndim == 0:
            return stored
        rows = stored.detach()[_own_rows(len(stored), self._mesh)].clone()
        one = rows.new_zeros((1,) * stored.ndim)
        empty = nn.Parameter(one.expand(stored.shape), requires_grad=False)
        if self._sharding.offload:
            rows = rows.cpu()
        self._rows[id(empty)] = (empty, rows)
        return empty

    def divide(self, module: TrainingModule) -> None:
        """Shard the trained networks that a step uses, block by block; parameters that
        were looked up before are no longer theirs. Raises UsageError for weights that
        are not fp32.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        dtypes = {one.dtype for one in module.trained.parameters.values()}
        if dtypes - {torch.float32}:
            # Each number is rounded by its own draw, which follows from its place in the
            # whole tensor.
            what = "sharded weights are trained in fp32, not in bf16"
            raise UsageError("--trainable_dtype", what, "leave it out")
        offloads = self._sharding.offload and self._device.type != "cpu"
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        for name in module.trained.components:
            network = module.networks[name]
            rows = self._take_rows(network)
            for part in (*repeated_blocks(network).values(), network):
                # Before the hooks of torch, which see what this one returns.
                part.register_forward_hook(_without_views)
                fully_shard(
                    part,
                    mesh=self._mesh,
                    reshard_after_forward=self._sharding.reshard_after_forward,
                    offload_policy=policy,
                )
                part.register_forward_hook(_give_up)
            self._fill(network, rows)

    def _take_rows(self, network: nn.Module) -> dict[str, Tensor]:
        """Return this process's rows by parameter, each of which becomes one without
        memory: those are left to be filled.
        """
        found = {}
        for name, parameter in list(network.named_parameters()):
            if id(parameter) in self._rows:
                _, found[name] = self._rows.pop(id(parameter))
                empty = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device="meta"
                )
                put(network, name, nn.Parameter(empty, parameter.requires_grad))
        return found

    def _fill(self, network: nn.Module, rows: Mapping[str, Tensor]) -> None:
        parameters = dict(network.named_parameters())
        divided = {}
        for name, own in rows.items():
            parameter: Any = parameters[name]
            # What is trained in part was read in the dtype of the rest.
            divided[name] = _as_divided(own.to(parameter.dtype), parameter, own.device)
        network.load_state_dict(divided, strict=False, assign=True)


def refuse_single_numbers(network: nn.Module) -> None:
    """Raise UsageError for a network with a weight that has no rows to shard."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 0:
            what = f"{name} of {type(network).__name__} is a single number, which has no rows"
            raise UsageError("sharding", what, "train without sharding")


def _mesh(sharding: Sharding, device: torch.device) -> DeviceMesh:
    """Return the processes as a line, or for hybrid as one line for each machine;
    raises UsageError for machines with different numbers of processes.
    """
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    among = sharding.processes(size, local)
    if sharding.mode == "full":
        return init_device_mesh(device.type, (size,))
    names = ("machine", "process")
    return init_device_mesh(device.type, (size // among, among), mesh_dim_names=names)


def _without_views(part: nn.Module, args: Any, output: Any) -> Any:
    """Copy what is a view: where something is added to one in place, the backward pass
    no longer passes the hook that puts the weights together.
    """
    return tree_map_only(
        Tensor, lambda one: one.clone() if one._is_view() else one, output
    )


def _give_up(part: Any, args: Any, output: Any) -> None:
    """Give up a part's whole weights where no backward pass will: the next forward pass
    would not see what was changed meanwhile, such as an average put in their place.
    """
    if not torch.is_grad_enabled():
        part.reshard()


@contextmanager
def keeping_gradients(module: TrainingModule) -> Iterator[None]:
    """Inside, gradients of LoRA layers add up in each process, as in DDP's `no_sync`;
    those of full networks are exchanged each time, since whole they need too much
    memory.
    """
    from torch.distributed.fsdp import FSDPModule

    with ExitStack() as stack:
        for name, network in module.networks.items():
            if isinstance(network, FSDPModule) and name in module.trained.lora:
                network.set_requires_gradient_sync(False)
                stack.callback(network.set_requires_gradient_sync, True)
        yield


def read_own_rows(
    path: Path, owner_of: Callable[[str], nn.Parameter | None]
) -> dict[str, Tensor]:
    """Read a file's tensors: of each with the shape of the parameter to which it belongs,
    by its name, only the rows that this process has of that, sharded in the same way.
    """
    divided: dict[str, DTensor] = {}

    def rows(name: str, shape: list[int]) -> slice | None:
        owner: Any = owner_of(name)
        if not is_divided(owner) or list(owner.shape) != shape:
            return None
        divided[name] = owner
        return _own_rows(len(owner), owner.device_mesh)

    tensors = read_rows(path, rows)
    return tensors | {
        name: _as_divided(tensors[name], owner, owner.to_local().device)
        for name, owner in divided.items()
    }


def _own_rows(count: int, mesh: DeviceMesh) -> slice:
    """Return which of so many rows this process has: torch gives each the same number,
    and the last ones what is left.
    """
    of_each = -(-count // mesh.size(mesh.ndim - 1))
    start = min(of_each * mesh.get_local_rank(mesh.ndim - 1), count)
    return slice(start, min(start + of_each, count))


def _as_divided(rows: Tensor, parameter: DTensor, device: torch.device) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows.to(device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
