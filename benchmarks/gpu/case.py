"""What is measured: a network, how its weights are kept, and which program trains it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    model: str
    program: str = "dstrain"
    """'dstrain'; 'bare' for its network without its training module; 'diffusers' or
    'reference' for a loop that does what these do in a step (`others`)."""
    method: str = ""
    """How linear layers are stored; '' for bf16."""
    checkpointing: str = "block"
    """'none', 'block' or 'offload'."""
    swap: int = 0
    """Blocks in RAM; -1 for all, and for the reference for each layer by itself."""
    train: str = "lora"
    """'lora' or 'full'."""
    optimizer: str = "adamw"
    compile: bool = False
    batch: int = 1
    layers: int = 0
    """Blocks; 0 for all of the published network."""
    rank: int = 32
    warm: int = 3
    """Steps before those that are measured."""
    steps: int = 8


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
    reserved_gib: float
    """The greatest of these: what a card needs."""
    tokens_per_s: float
    tflops: float
    """Model FLOPs per second, without recomputation and attention."""
    losses: tuple[float, ...]
