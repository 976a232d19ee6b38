"""One configuration: loaded, trained for some steps by dstrain's own modules, measured."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from dstrain import (
    SFT,
    Batch,
    LoraConfig,
    Pipeline,
    Sample,
    SampleKey,
    Trainables,
    TrainConfig,
    TrainingModule,
)
from dstrain.graph.noise_process import TRAIN_TIMESTEPS
from dstrain.models import components_of
from dstrain.models.execution import enable_checkpointing, repeated_blocks
from dstrain.models.placing import Place, keep
from dstrain.plugin import InferenceOnly
from dstrain.registry import load_family
from dstrain.training import MicroBatch
from dstrain.training.optimizers import build_optimizer, choose_optimizer
from dstrain_memory.block_swap import BlockSwap
from dstrain_memory.compilation import compile_blocks
from dstrain_memory.quantization.keeper import Quantize
from dstrain_memory.quantization.known_methods import METHODS
from dstrain_memory.quantization.stored_layers import StoredComponent, StoredLayers
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.gpu import others
from benchmarks.gpu.case import Case, Measured
from benchmarks.gpu.networks import DTYPE, WORKLOADS, build, configuration

GIB = 2**30
LORA_FLOPS = 4
"""Per parameter and token: forward, and the gradient of the input."""
FULL_FLOPS = 6
"""And the gradient of the weight."""


@dataclass
class Ready:
    """What is ready to be trained."""

    parameters: int
    """The numbers that the network has."""
    trained: dict[str, nn.Parameter]
    loss: Callable[[], Tensor]
    """Computes the loss of a step."""
    release: Callable[[], None]
    """Follows the backward pass."""


class Meter:
    """Peaks of a GPU's memory, by phase."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.peaks: dict[str, tuple[float, float]] = {}

    def mark(self, phase: str) -> None:
        """Note the peak since the last phase."""
        if not self.is_cuda:
            return
        torch.cuda.synchronize()
        allocated = torch.cuda.max_memory_allocated() / GIB
        reserved = torch.cuda.max_memory_reserved() / GIB
        self.peaks[phase] = round(allocated, 2), round(reserved, 2)
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> float:
        """Return the time when the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def store_of(case: Case) -> Place:
    """Return what stores a weight by the case's method."""
    if not case.method:
        return keep
    family = load_family(WORKLOADS[case.model].family)
    component = components_of(family)[family.default_trainable]
    methods = (StoredLayers(METHODS[case.method]),)
    stored = StoredComponent(methods, component.as_loaded)
    return partial(Quantize({component.name: stored}).place, component.name)


def ready(case: Case, device: torch.device, tiny: bool) -> Ready:
    """Load what a case trains, on a device."""
    workload = WORKLOADS[case.model]
    family = load_family(workload.family)
    name = family.default_trainable
    content = configuration(workload, case.layers, tiny)
    is_other = case.program in ("diffusers", "reference")
    store = others.store_of(case) if is_other else store_of(case)
    network, count = build(workload, content, device, store)
    config = components_of(family)[name].configure(content)
    spec = family.spec(workload.variant)
    pipeline = Pipeline(
        spec, family, {name: network}, {name: config}, device=device, dtype=DTYPE
    )
    torch.manual_seed(0)
    tokens = 16 if tiny else workload.tokens
    text = 8 if tiny else workload.text
    values = workload.values(workload, config, tokens, text)
    if is_other:
        weights = others.prepare(case, network, device)
        trained = {str(index): one for index, one in enumerate(weights)}
        loss = partial(_bare_loss, pipeline, values, case.batch)
        return Ready(count, trained, loss, _nothing)
    module, release = _module(case, pipeline, name)
    loss = partial(module, _batch(case, values))
    if case.program == "bare":
        loss = partial(_bare_loss, pipeline, values, case.batch)
    return Ready(count, dict(module.trained.parameters), loss, release)


def _module(
    case: Case, pipeline: Pipeline, name: str
) -> tuple[TrainingModule, Callable[[], None]]:
    """Return dstrain's training module, which trains the component of this name, and what
    follows its backward pass.
    """
    module = TrainingModule(pipeline, SFT, stage="train")
    network = pipeline.components[name]
    if case.train == "full":
        module.switch_to_training_mode(Trainables((name,)), seed=0, dtype=DTYPE)
    else:
        targets = tuple(pipeline.family.lora_targets[name])
        layers = LoraConfig(name, targets, case.rank, case.rank)
        module.switch_to_training_mode(Trainables((), (layers,)), seed=0)
    if case.checkpointing != "none":
        enable_checkpointing(name, network, case.checkpointing == "offload")
    blocks = len(repeated_blocks(network)) if case.swap < 0 else case.swap
    swap = BlockSwap(pipeline.device)
    if blocks:
        swap.add(name, network, blocks)
    if case.compile:
        compile_blocks({name: network}, pipeline.device)
    return module, swap.release


def optimizer_of(case: Case, trained: dict[str, nn.Parameter]) -> Optimizer:
    """Return dstrain's optimizer, or the one that the other programs use."""
    if case.program in ("diffusers", "reference"):
        return torch.optim.AdamW(trained.values(), 1e-4, fused=True)
    options = TrainConfig(
        model=case.model,
        optimizer=case.optimizer,
        mixed_precision="bf16",
        trainable_dtype="bf16" if case.train == "full" else "fp32",
    )
    return build_optimizer(choose_optimizer(options), trained)


def measure(case: Case, device: torch.device, tiny: bool) -> Measured:
    """Measure a case; raises what dstrain raises where it cannot be run.

    Args:
        case: What is measured.
        device: Where.
        tiny: Whether the network is of toy size.
    """
    meter = Meter(device)
    start = meter.now()
    this = ready(case, device, tiny)
    load_s = meter.now() - start
    meter.mark("loading")
    optimizer = optimizer_of(case, this.trained)
    times = []
    losses = []
    for step in range(case.warm + case.steps):
        begin = meter.now()
        note = meter.mark if step == case.warm else _nothing
        loss = this.loss()
        note("forward")
        loss.backward()
        this.release()
        note("backward")
        torch.nn.utils.clip_grad_norm_(this.trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        note("optimizer")
        times.append(meter.now() - begin)
        losses.append(loss.item())
    measured = sorted(times[case.warm :])
    median = statistics.median(measured)
    workload = WORKLOADS[case.model]
    tokens = case.batch * (16 + 8 if tiny else workload.tokens + workload.text)
    per_token = LORA_FLOPS if case.train == "lora" else FULL_FLOPS
    return Measured(
        case=case,
        parameters=this.parameters,
        trained=sum(one.numel() for one in this.trained.values()),
        step_s=round(median, 4),
        least_s=round(measured[0], 4),
        first_s=round(times[0], 3),
        load_s=round(load_s, 2),
        peaks_gib=meter.peaks,
        reserved_gib=max((one for _, one in meter.peaks.values()), default=0.0),
        tokens_per_s=round(tokens / median, 1),
        tflops=round(per_token * this.parameters * tokens / median / 1e12, 6),
        losses=tuple(losses),
    )


def copy_rate(device: torch.device, size: int = GIB) -> float | None:
    """Return GB/s from pinned memory to a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    target.copy_(source)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return round(4 * size / (time.perf_counter() - begin) / 1e9, 1)


def _batch(case: Case, values: dict[str, Tensor]) -> Batch:
    keys = [SampleKey(0, 0, 0, row) for row in range(case.batch)]
    micro = MicroBatch(keys, [1.0] * case.batch, case.batch, ends_step=True)
    family = load_family(WORKLOADS[case.model].family)
    spec = family.spec(WORKLOADS[case.model].variant)
    constants = {name: one.value for name, one in spec.constants.items()}
    given = (
        name
        for name, source in spec.inputs.items()
        if not isinstance(source, InferenceOnly)
        and not getattr(source, "optional", False)
    )
    sample = Sample({**constants, **values}, frozenset(given))
    return Batch(micro, [sample] * case.batch)


def _nothing(*_: str) -> None:
    """Note or release nothing."""


def _bare_loss(pipeline: Pipeline, values: dict[str, Tensor], count: int) -> Tensor:
    """Return the loss of one call of model_fn on noise, with nothing around it."""
    given = {
        name: one.to(pipeline.device).expand(count, *one.shape[1:])
        for name, one in values.items()
    }
    latents = given.pop("input_latents")
    noise = torch.randn_like(latents)
    sigma = torch.rand(count, device=latents.device)
    level = sigma.view(-1, *[1] * (latents.ndim - 1))
    noisy = (1 - level) * latents + level * noise
    network = next(iter(pipeline.components.values()))
    with torch.autocast(pipeline.device.type, DTYPE):
        prediction = pipeline.spec.model_fn.function(
            noisy, sigma * TRAIN_TIMESTEPS, **given, dit=network
        )
    loss: Tensor = (prediction.float() - (noise - latents)).square().mean()
    return loss
