"""One configuration: loaded, trained for some steps by dstrain's own modules, measured."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from dstrain.config.options.train import TrainConfig
from dstrain.graph.inputs import InferenceOnly
from dstrain.lora.layers import LoraConfig, Trainables
from dstrain.models.components import components_of
from dstrain.models.execution.blocks import repeated_blocks
from dstrain.models.execution.compilation import compile_blocks
from dstrain.models.execution.gradient_checkpointing import enable_checkpointing
from dstrain.models.execution.kept import Kept, StoredLayers
from dstrain.models.networks import Place, keep
from dstrain.models.quantization.layers import LayerStore
from dstrain.models.quantization.methods import METHODS
from dstrain.pipeline.pipeline import Pipeline
from dstrain.randomness import SampleKey
from dstrain.registry.discovery import load_family
from dstrain.training.batching import MicroBatch
from dstrain.training.loader import Batch, Sample
from dstrain.training.losses import SFT
from dstrain.training.module import TrainingModule
from dstrain.training.optimizers.build import build_optimizer
from dstrain.training.optimizers.choice import choose_optimizer

from benchmarks.gpu.networks import DTYPE, WORKLOADS, build, configuration

GIB = 2**30
LORA_FLOPS = 4
"""Per parameter and token: forward, and the gradient of the input."""
FULL_FLOPS = 6
"""And the gradient of the weight."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured."""

    model: str
    method: str = ""
    """How linear layers are stored; '' for bf16."""
    checkpointing: str = "block"
    """'none', 'block' or 'offload'."""
    swap: int = 0
    """Blocks in RAM; -1 for all."""
    train: str = "lora"
    """'lora' or 'full'."""
    optimizer: str = "adamw"
    compile: bool = False
    batch: int = 1
    layers: int = 0
    """Blocks; 0 for all of the published network."""
    rank: int = 32
    bare: bool = False
    """Whether model_fn is called alone, without dstrain's module around it."""


@dataclass(frozen=True)
class Measured:
    """What a case needs."""

    case: Case
    parameters: int
    trained: int
    step_s: float
    """Median of the steps."""
    least_s: float
    first_s: float
    load_s: float
    peaks_gib: dict[str, tuple[float, float]]
    """After loading, forward, backward, optimizer -> peak allocated and reserved; empty
    on a CPU."""
    tflops: float
    """Model FLOPs per second, without recomputation and attention."""
    losses: tuple[float, ...]

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


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
    kept = Kept((StoredLayers(METHODS[case.method]),))
    return LayerStore(kept, component.name, component.unquantized)


def module_of(
    case: Case, device: torch.device, tiny: bool
) -> tuple[TrainingModule, int, dict[str, torch.Tensor]]:
    """Build a training module; return it with the number of the network's parameters and
    the cached values of a sample.
    """
    workload = WORKLOADS[case.model]
    family = load_family(workload.family)
    name = family.default_trainable
    content = configuration(workload, case.layers, tiny)
    network, count = build(workload, content, device, store_of(case))
    config = components_of(family)[name].configure(content)
    spec = family.spec(workload.variant)
    pipeline = Pipeline(
        spec, family, {name: network}, {name: config}, device=device, dtype=DTYPE
    )
    module = TrainingModule(pipeline, SFT, stage="train")
    targets = tuple(family.lora_targets[name])
    trainables = Trainables((name,))
    if case.train == "lora":
        trainables = Trainables((), (LoraConfig(name, targets, case.rank, case.rank),))
    module.switch_to_training_mode(trainables, seed=0)
    if case.checkpointing != "none":
        enable_checkpointing(name, network, case.checkpointing == "offload")
    blocks = len(repeated_blocks(network)) if case.swap < 0 else case.swap
    if blocks:
        module.block_swap = type(module.block_swap)(device)
        module.block_swap.add(name, network, blocks)
    if case.compile:
        compile_blocks({name: network})
    tokens = 16 if tiny else workload.tokens
    text = 8 if tiny else workload.text
    torch.manual_seed(0)
    return module, count, workload.values(workload, config, tokens, text)


def measure(
    case: Case, device: torch.device, tiny: bool, warm: int, steps: int
) -> Measured:
    """Measure a case; raises what dstrain raises where it cannot be run.

    Args:
        case: What is measured.
        device: Where.
        tiny: Whether the network is of toy size.
        warm: Steps that are not measured.
        steps: Steps that are.
    """
    meter = Meter(device)
    start = meter.now()
    module, parameters, values = module_of(case, device, tiny)
    load_s = meter.now() - start
    meter.mark("loading")
    choice = choose_optimizer(
        TrainConfig(model=case.model, optimizer=case.optimizer, mixed_precision="bf16")
    )
    optimizer = build_optimizer(choice, module.trained.parameters)
    batch = _batch(case, values)
    times = []
    losses = []
    for step in range(warm + steps):
        begin = meter.now()
        note = meter.mark if step == warm else _ignore
        loss = _bare_loss(module, batch) if case.bare else module(batch)
        note("forward")
        loss.backward()
        module.block_swap.release()
        note("backward")
        torch.nn.utils.clip_grad_norm_(module.trained_parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        note("optimizer")
        times.append(meter.now() - begin)
        losses.append(loss.item())
    measured = sorted(times[warm:])
    median = measured[len(measured) // 2]
    workload = WORKLOADS[case.model]
    tokens = case.batch * (workload.tokens + workload.text)
    flops = (LORA_FLOPS if case.train == "lora" else FULL_FLOPS) * parameters * tokens
    return Measured(
        case=case,
        parameters=parameters,
        trained=sum(one.numel() for one in module.trained_parameters),
        step_s=round(median, 4),
        least_s=round(measured[0], 4),
        first_s=round(times[0], 3),
        load_s=round(load_s, 2),
        peaks_gib=meter.peaks,
        tflops=0.0 if tiny else round(flops / median / 1e12, 1),
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


def _batch(case: Case, values: dict[str, torch.Tensor]) -> Batch:
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


def _ignore(phase: str) -> None:
    """Note nothing."""


def _bare_loss(module: TrainingModule, batch: Batch) -> torch.Tensor:
    """Return the loss of one call of model_fn on noise, with nothing around it."""
    pipeline = module.pipeline
    values = {
        name: value.to(pipeline.device)
        for name, value in batch.samples[0].values.items()
    }
    latents = values.pop("input_latents")
    count = len(batch.samples)
    latents = latents.expand(count, *latents.shape[1:])
    given = {name: one.expand(count, *one.shape[1:]) for name, one in values.items()}
    noisy = torch.randn_like(latents)
    time_ = torch.full((count,), 500.0, device=latents.device)
    network = next(iter(pipeline.components.values()))
    with torch.autocast(pipeline.device.type, DTYPE):
        prediction = pipeline.spec.model_fn.function(noisy, time_, **given, dit=network)
    loss: torch.Tensor = (prediction.float() - (noisy - latents)).square().mean()
    return loss
