"""Values that one function hands to another are what they were, split or not."""

import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from dstrain import (
    Batch,
    Frames,
    LoraConfig,
    SampleKey,
    Task,
    Trainables,
    TrainingModule,
    UsageError,
)
from dstrain.cache import FeatureCache
from dstrain.distributed import ProcessGroup
from dstrain.graph import FunctionSpec
from dstrain.plugin import FlowMatchSchedule, LatentConstraint, PipelineSpec
from dstrain.runs import Setup, data_process, open_training_data, prepare
from dstrain.runs.loop import steps
from dstrain.training import MicroBatch
from PIL import Image
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.program_runs import equal, run, write_program
from tests.support.programs import INPUTS, NETS, WIDTH, Program, loss_body, pixels, read
from tests.support.units import declared

PROMISE = "values handed over: no change in place, no lost or shared value"
ROWS = ("a dog", "two cats", "a bird", "a fish on a roof")
SCHEDULE = FlowMatchSchedule(shift=3.0)


@dataclass(frozen=True)
class Bodies:
    """What the functions of a program do."""

    subject: Callable[..., Any] = lambda tensor: tensor.cos()
    """What makes `made` of its inputs."""
    reads: tuple[str, ...] = ("tensor",)
    components: tuple[str, ...] = ()
    reader: Callable[[Any], Tensor] = read
    """How predict reads `made`."""
    changed: str = ""
    """The value that `changing`, a function of the step, changes in place."""
    changing: str = ""
    change: Callable[[Any], Any] = id


def source(prompt: str) -> dict[str, Any]:
    """A text to values of every kind that can be changed in place."""
    tensor = read(prompt).sin()
    return {
        "tensor": tensor,
        "several": [tensor * 2, tensor * 3],
        "record": {"inner": [tensor * 4], "size": WIDTH},
        "image": Image.fromarray(pixels(tensor).view(2, 2).numpy()),
        "clip": Frames(pixels(tensor)[None, :, None, None].expand(1, 4, 1, 3), 25.0),
    }


def written(
    bodies: Bodies,
    folder: Path,
    trainables: Trainables | None = None,
    batch_size: int = 1,
    dropouts: Mapping[str, float] | None = None,
    rows: Sequence[str] = ROWS,
) -> Setup:
    """A run, not split, of a program of two units: `source` and `subject`."""

    def reading(function: str, body: Callable[..., Any]) -> FunctionSpec:
        """A function of the step; it reads what it changes, and changes it."""
        if bodies.changing != function:
            return FunctionSpec(function, body)

        def changing(*given: Any, **named: Any) -> Any:
            bodies.change(named.pop(bodies.changed))
            return body(*given, **named)

        return FunctionSpec(function, changing, {bodies.changed: True})

    def predict(noisy_latents: Tensor, timestep: Tensor, **named: Any) -> Tensor:
        hidden = noisy_latents + timestep[:, None] / 1000
        result: Tensor = named["dit"](hidden + bodies.reader(named["made"]))
        return result

    def hold(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
        return LatentConstraint(latents, timestep)

    def subject(**named: Any) -> dict[str, Any]:
        used = (*bodies.reads, *bodies.components)
        return {"made": bodies.subject(*(named[one] for one in used if one != "rng"))}

    kinds = dict.fromkeys(source(""), "tensor")
    reads = dict.fromkeys(bodies.reads, True)
    made = {"made": "tensor"}
    model_fn = reading("predict", predict)
    loss = reading("loss", partial(loss_body, (), ("positive",)))
    spec = PipelineSpec(
        family="random",
        variant="base",
        components=NETS,
        units=(
            declared("source", source, {"prompt": True}, (), kinds),
            declared("subject", subject, reads, bodies.components, made),
        ),
        model_fn=replace(
            model_fn, inputs={**model_fn.inputs, "made": True}, components=("dit",)
        ),
        decoders=(),
        inputs=INPUTS,
        schedule=SCHEDULE,
        latent_shape=FunctionSpec("shape", lambda: (1, WIDTH)),
        apply_guidance=lambda positive, negative, scale: positive,
        constrain_latents=reading("constrain_latents", hold),
        cfg_inputs={"prompt": "negative_prompt"},
    )
    context = ("rng", "timestep_sampler", "constrain_latents")
    task = Task("random", replace(loss, components=context), ("positive",))
    trained = trainables or Trainables(("dit",))
    lines = [{"prompt": one, "negative": "", "number": "", "image": ""} for one in rows]
    rates = dict.fromkeys(NETS, 0.0) | dict(dropouts or {})
    folder.mkdir(exist_ok=True)
    return write_program(
        Program(spec, task, trained, rates, tuple(lines), batch_size), folder
    )


def stage_1(setup: Setup) -> None:
    data_process(
        replace(setup, stage="data_process"), ProcessGroup(Accelerator(cpu=True))
    )


def train(setup: Setup) -> None:
    """Train as a run does, for an epoch."""
    processes = ProcessGroup(Accelerator(cpu=True))
    samples = open_training_data(setup)
    for _ in steps(prepare(setup, processes, samples, TrainingModule)):
        pass


def error_of(work: Callable[[], Any]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        work()
    return caught.value


# Changes in place.

CHANGES: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "add to a tensor": ("tensor", lambda v: v.add_(1)),
        "write an element": ("tensor", lambda v: v.__setitem__((0, 0), 7.0)),
        "write through a view": ("tensor", lambda v: v.view(-1)[1:].zero_()),
        "append to a list": ("several", lambda v: v.append(v[0])),
        "reverse a list": ("several", lambda v: v.reverse()),
        "a tensor in a list": ("several", lambda v: v[1].mul_(2)),
        "write into a record": ("record", lambda v: v.update(size=1)),
        "a tensor deep in a record": ("record", lambda v: v["inner"][0].neg_()),
        "paste into an image": ("image", lambda v: v.paste(9, (0, 0, 1, 1))),
        "write into frames": ("clip", lambda v: v.pixels.zero_()),
    }
)
CHANGERS = ("unit", "live unit", "predict", "constrain_latents", "loss")


@pytest.mark.promise("R10", PROMISE)
@pytest.mark.parametrize("changer", CHANGERS)
@pytest.mark.parametrize("case", CHANGES)
def test_a_change_in_place_is_named_in_both_ways_of_running(
    changer: str, case: str, tmp_path: Path
) -> None:
    name, change = CHANGES[case]
    if "unit" in changer:

        def changing(value: Any) -> Tensor:
            change(value)
            return torch.ones(1, WIDTH)

        components = ("rng",) if changer == "live unit" else ()
        bodies = Bodies(changing, (name,), components)
    else:
        bodies = Bodies(changed=name, changing=changer, change=change)
    setup = written(bodies, tmp_path)
    errors = [error_of(lambda: train(setup))]
    if changer == "unit":
        errors.append(error_of(lambda: stage_1(setup)))
    else:
        stage_1(setup)
        errors.append(error_of(lambda: train(replace(setup, stage="train"))))
    for error in errors:
        said = str(error)
        assert f"changes its input {name!r} in place" in said
        assert ("unit subject" if "unit" in changer else changer) in said
        assert "clone" in said


# Buffers that are used again.


def filled(buffer: Tensor, tensor: Tensor) -> Tensor:
    return buffer.copy_(tensor)


def listed(buffer: list[Any], tensor: Tensor) -> list[Any]:
    buffer[:] = [tensor]
    return buffer


def noted(buffer: dict[str, Any], tensor: Tensor) -> dict[str, Any]:
    buffer["a"] = tensor
    return buffer


def painted(buffer: Image.Image, tensor: Tensor) -> Image.Image:
    buffer.paste(int(pixels(tensor)[0]), (0, 0, 2, 2))
    return buffer


def shown(buffer: Frames, tensor: Tensor) -> Frames:
    buffer.pixels.fill_(int(pixels(tensor)[0]))
    return buffer


BUFFERS: Mapping[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = (
    MappingProxyType(
        {
            "a tensor": (lambda: torch.zeros(1, WIDTH), filled),
            "a view of a larger one": (lambda: torch.zeros(3, WIDTH)[1:2], filled),
            "a view of all": (lambda: torch.zeros(WIDTH).view(1, -1), filled),
            "detached": (lambda: torch.zeros(1, WIDTH), lambda b, t: filled(b, t).detach()),
            "a tensor in a list": (lambda: torch.zeros(1, WIDTH), lambda b, t: [filled(b, t)]),
            "a numpy array": (
                lambda: np.zeros((1, WIDTH), np.float32),
                lambda b, t: filled(torch.from_numpy(b), t),
            ),
            "one tensor twice": (
                lambda: torch.zeros(1, WIDTH),
                lambda b, t: [filled(b, t), b, b.view(1, -1)],
            ),
            "a list": (list, listed),
            "a record": (dict, noted),
            "an image": (lambda: Image.new("L", (2, 2)), painted),
            "frames": (
                lambda: Frames(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), 8.0),
                shown,
            ),
        }
    )
)  # fmt: skip


@pytest.mark.promise("R10", PROMISE)
@pytest.mark.parametrize("live", [False, True], ids=["cached", "live"])
@pytest.mark.parametrize("case", BUFFERS)
def test_a_buffer_that_is_returned_at_every_call_changes_no_earlier_value(
    case: str, live: bool, tmp_path: Path
) -> None:
    new, fill = BUFFERS[case]
    buffer = new()
    batch_size = 1 if case in ("an image", "frames") else 4
    seen = []
    for name, subject in (
        ("fresh", lambda tensor: fill(new(), tensor)),
        ("again", lambda tensor: fill(buffer, tensor)),
    ):
        bodies = Bodies(subject, components=("rng",) if live else ())
        setup = written(bodies, tmp_path / name, batch_size=batch_size)
        stage_1(setup)
        seen += [run(setup)[2], run(replace(setup, stage="train"))[2]]
    assert all(equal(seen[0], other) for other in seen[1:])


# Values that are stored exactly, and values that are refused.


def exact(value: Any) -> bytes:
    """All that a function could notice of a value."""
    if isinstance(value, Tensor):
        about = (value.dtype, *value.shape, *value.stride(), value.is_inference())
        plain = value.resolve_conj().resolve_neg().detach().contiguous().reshape(-1)
        lazy = (value.is_conj(), value.is_neg(), value.requires_grad)
        return f"{about}{lazy}".encode() + plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, Image.Image):
        about = (value.mode, value.size, sorted(value.info))
        return f"{about}".encode() + value.convert("RGBA").tobytes()
    if isinstance(value, Frames):
        return exact(value.pixels) + exact(value.fps)
    if isinstance(value, list):
        return b"".join(map(exact, value))
    if isinstance(value, dict):
        return b"".join(exact(key) + exact(item) for key, item in value.items())
    if isinstance(value, float):
        return struct.pack("d", value)
    return f"{type(value)}{value!r}".encode()


def exactly(value: Any) -> Tensor:
    return torch.full((1, WIDTH), zlib.crc32(exact(value)) / 2**32)


def transparent(tensor: Tensor) -> Image.Image:
    image = Image.fromarray(pixels(tensor).repeat(3, 1).T.reshape(2, 2, 3).numpy())
    image.info["transparency"] = image.getpixel((0, 0))
    return image


def inferred(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor * 2


STORED: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        "negative nan": lambda t: -float("nan"),
        "one number": lambda t: t.sum(),
        "conjugated lazily": lambda t: torch.complex(t, t.cos()).conj(),
        "needs a gradient": lambda t: t.clone().requires_grad_(),
        "parameter": lambda t: torch.nn.Parameter(t.clone()),
        "image with a transparent colour": transparent,
        "nan": lambda t: float("nan"),
        "infinity": lambda t: -float("inf"),
        "negative zero": lambda t: -0.0,
        "the least float": lambda t: 5e-324,
        "a large integer": lambda t: -(2**300),
        "a truth value": lambda t: True,
        "nothing where a tensor is declared": lambda t: None,
        "a text": lambda t: '\0"\u2028\x7f\U0001f600\\ud83d',
        "no items": lambda t: [[], {}, ""],
        "no number": lambda t: t[:, :0],
        "no rows": lambda t: torch.zeros(0, 3, dtype=torch.int8),
        "bf16": lambda t: t.bfloat16(),
        "fp16": lambda t: t.half(),
        "fp8": lambda t: t.to(torch.float8_e4m3fn),
        "fp64": lambda t: t.double() / 3,
        "uint16": lambda t: pixels(t).to(torch.uint16),
        "truth values": lambda t: t > 0,
        "complex": lambda t: torch.complex(t, t.cos()),
        "negated lazily": lambda t: torch.complex(t, t.cos()).conj().imag,
        "expanded": lambda t: t.expand(3, WIDTH),
        "turned": lambda t: t.repeat(3, 1).t(),
        "strides of an axis of one": lambda t: t.t().contiguous().t(),
        "inference tensor": inferred,
        "image without pixels": lambda t: Image.new("RGB", (0, 3)),
        "rgba": lambda t: transparent(t).convert("RGBA"),
        "records in lists": lambda t: [{"a": [{"b": t}, None]}, {"a": {"a": 1}}],
    }
)  # fmt: skip


@pytest.mark.promise("R10", PROMISE)
@pytest.mark.parametrize("case", STORED)
def test_a_value_is_stored_exactly(case: str, tmp_path: Path) -> None:
    bodies = Bodies(STORED[case], reader=exactly)
    setup = written(bodies, tmp_path)
    stage_1(setup)
    assert equal(run(setup)[2], run(replace(setup, stage="train"))[2])
    train(setup)


class Marked(Tensor):
    """A tensor that could keep more than its numbers."""


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED: Mapping[str, tuple[Callable[[Tensor], Any], str]] = MappingProxyType(
    {
        "tuple": (lambda t: (t, t), "type tuple"),
        "tuple in a record": (lambda t: {"a": [(1, 2)]}, "made/a/0"),
        "numpy float": (lambda t: np.float64(1), "type float64"),
        "numpy small float": (lambda t: np.float32(1), "type float32"),
        "numpy integer": (lambda t: np.int64(1), "type int64"),
        "numpy truth value": (lambda t: np.bool_(True), "type bool"),
        "numpy text": (lambda t: np.str_("a"), "type str_"),
        "numpy array": (lambda t: t.numpy(), "type ndarray"),
        "complex number": (lambda t: 1j, "type complex"),
        "bytes": (lambda t: b"a", "type bytes"),
        "set": (lambda t: {1}, "type set"),
        "size": (lambda t: t.shape, "type Size"),
        "ordered record": (lambda t: OrderedDict(a=1), "type OrderedDict"),
        "key that is no text": (lambda t: {0: t}, "key 0"),
        "key with a slash": (lambda t: {"a/b": t, "a": {"b": t}}, "key 'a/b'"),
        "endless integer": (lambda t: 10**5000, "4096 bits"),
        "half a surrogate pair": (lambda t: "\ud83d", "surrogate"),
        "two halves": (lambda t: ["\ud83d\ude00"], "surrogate"),
        "list in itself": (lambda t: CYCLE, "64 deep"),
        "complex128": (lambda t: torch.complex(t, t).to(torch.complex128), "complex128"),
        "sparse": (lambda t: t.to_sparse(), "sparse"),
        "quantized": (lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8), "qint8"),
        "without data": (lambda t: t.to("meta"), "meta"),
        "subclass": (lambda t: t.as_subclass(Marked), "class Marked"),
        "nothing at all": (None, "returned NoneType"),
        **{
            f"image {mode}": (partial(lambda mode, t: Image.new(mode, (2, 2)), mode), f"mode {mode}")
            for mode in ("P", "1", "LA", "F", "CMYK", "I;16")
        },
    }
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch on kinds of tensors
@pytest.mark.promise("R10", PROMISE)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_exactly_is_refused_by_row_alike_and_the_rest_is_kept(
    case: str, tmp_path: Path
) -> None:
    make, fault = REFUSED[case]
    bad = read(ROWS[2]).sin()
    calls = []

    def subject(tensor: Tensor) -> Any:
        calls.append(tensor)
        if mended or not torch.equal(tensor, bad):
            return [tensor]
        assert make
        return make(tensor)

    def returned(tensor: Tensor) -> Any:
        """Return nothing at all for the bad row."""
        calls.append(tensor)
        is_bad = not mended and torch.equal(tensor, bad)
        return None if is_bad else {"made": [tensor]}

    mended = False
    setup = written(Bodies(subject), tmp_path)
    if make is None:
        object.__setattr__(setup.spec.units[1], "function", returned)
    unsplit = error_of(lambda: train(setup))
    split = error_of(lambda: stage_1(setup))
    for error in (unsplit, split):
        assert error.where == "metadata.csv:4"
        assert error.what.startswith("unit subject: ")
        assert fault in error.what
    assert (unsplit.what, unsplit.help_lines) == (split.what, split.help_lines)
    assert len(FeatureCache.open(tmp_path / "cache")) == 2
    mended = True
    calls.clear()
    stage_1(setup)
    assert len(calls) == 2
    assert equal(run(setup)[2], run(replace(setup, stage="train"))[2])


# Samples of one batch that differ.

DIFFERENT: Mapping[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = (
    MappingProxyType(
        {
            "tensor, or none": (lambda t: t, lambda t: None),
            "none, or tensor": (lambda t: None, lambda t: t),
            "none in a list": (lambda t: [t, None], lambda t: [None, t]),
            "none in a record": (lambda t: {"a": t}, lambda t: {"a": None}),
            "other fields": (lambda t: {"a": t}, lambda t: {"b": t}),
            "other lengths": (lambda t: [t], lambda t: [t, t]),
            "other shapes": (lambda t: t, lambda t: t[:, :2]),
            "other axes": (lambda t: t, lambda t: t[None]),
            "other dtypes": (lambda t: t, lambda t: t.bfloat16()),
            "no axis": (lambda t: t.sum(), lambda t: t.sum()),
            "first axis of two": (lambda t: t.repeat(2, 1), lambda t: t.repeat(2, 1)),
            "tensor, or number": (lambda t: t, lambda t: 1.0),
            "numbers of two kinds": (lambda t: 1, lambda t: True),
            "texts": (lambda t: "a", lambda t: "b"),
            "images": (
                lambda t: Image.new("L", (2, 2)),
                lambda t: Image.new("L", (2, 2), 9),
            ),
            "frames": (
                lambda t: Frames(torch.zeros(1, 2, 2, 3), 8.0),
                lambda t: Frames(torch.ones(1, 2, 2, 3), 8.0),
            ),
        }
    )
)


@pytest.mark.promise("R10", PROMISE)
@pytest.mark.parametrize("case", DIFFERENT)
def test_samples_of_a_batch_that_differ_are_named(case: str, tmp_path: Path) -> None:
    one, other = DIFFERENT[case]
    first = read(ROWS[0]).sin()

    def subject(tensor: Tensor) -> Any:
        return (one if torch.equal(tensor, first) else other)(tensor)

    bodies = Bodies(subject, reader=exactly)
    setup = written(bodies, tmp_path / "batch", batch_size=2, rows=ROWS[:2])
    stage_1(setup)
    unsplit = error_of(lambda: train(setup))
    split = error_of(lambda: train(replace(setup, stage="train")))
    assert set(unsplit.where.split(", ")) <= {"metadata.csv:2", "metadata.csv:3"}
    assert unsplit.what == split.what
    assert unsplit.what.startswith("batch, value made")
    assert "samples of one batch differ in it: " in unsplit.what
    assert "--batch_size 1" in str(unsplit)
    alone = written(bodies, tmp_path / "alone", rows=ROWS[:2])
    train(alone)


# Batches of live units with dropout.


def through(tensor: Tensor, net_a: Any) -> Tensor:
    result: Tensor = net_a(tensor)
    return result


def twice(tensor: Tensor, net_a: Any) -> Tensor:
    result: Tensor = net_a(net_a(tensor))
    return result


def by_torch(tensor: Tensor, net_a: Any) -> Tensor:
    result: Tensor = net_a(tensor) * torch.rand(1, WIDTH)
    return result


def checkpointed(tensor: Tensor, net_a: Any) -> Tensor:
    result: Tensor = checkpoint(net_a, tensor, use_reentrant=False)
    return result


LORA = LoraConfig("net_a", ("first",), 2, 3.0)
LIVE: Mapping[str, tuple[Callable[..., Tensor], Trainables]] = MappingProxyType(
    {
        "in full": (through, Trainables(("dit", "net_a"))),
        "alone": (through, Trainables(("net_a",))),
        "twice": (twice, Trainables(("dit", "net_a"))),
        "with LoRA": (through, Trainables(("dit",), (LORA,))),
        "torch's own numbers": (by_torch, Trainables(("dit", "net_a"))),
        "checkpointed": (checkpointed, Trainables(("dit", "net_a"))),
    }
)


def gradients(
    module: TrainingModule, source: Any, batches: Sequence[Sequence[SampleKey]]
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the samples, and the gradient of a step in these micro-batches."""
    module.zero_grad(set_to_none=True)
    total = sum(map(len, batches))
    losses: list[float] = []
    for keys in batches:
        samples = [source.sample(key.row) for key in keys]
        losses += module.losses(samples, keys).tolist()
        micro = MicroBatch(keys, (1.0,) * len(keys), total, ends_step=True)
        module(Batch(micro, samples)).backward()
    parameters = module.trained.parameters
    return losses, {
        name: one.grad.clone()
        for name, one in parameters.items()
        if one.grad is not None
    }


@pytest.mark.promise("R10", PROMISE)
@pytest.mark.parametrize("stage", ["", "train"], ids=["unsplit", "split"])
@pytest.mark.parametrize("case", LIVE)
def test_a_batch_is_its_samples_though_live_units_have_dropout(
    case: str, stage: str, tmp_path: Path
) -> None:
    subject, trained = LIVE[case]
    bodies = Bodies(subject, components=("net_a",))
    setup = written(bodies, tmp_path, trained, 4, {"net_a": 0.5})
    stage_1(setup)
    module, samples, _ = run(replace(setup, stage=stage))
    keys = [SampleKey(0, 1, 2, row) for row in range(4)]
    together = gradients(module, samples, [keys])
    for cut in ([[key] for key in keys], [keys[:3], keys[3:]]):
        losses, grads = gradients(module, samples, cut)
        assert losses == pytest.approx(together[0], rel=1e-6)
        assert grads.keys() == together[1].keys()
        for name, grad in grads.items():
            assert torch.allclose(grad, together[1][name], 1e-5, 1e-6), name
    backwards, _ = gradients(module, samples, [keys[::-1]])
    assert backwards[::-1] == pytest.approx(together[0], rel=1e-6)
    other, _ = gradients(module, samples, [[key._replace(repeat=3) for key in keys]])
    assert other != pytest.approx(together[0], rel=1e-3)


def test_a_checkpointed_live_unit_has_the_same_gradients(tmp_path: Path) -> None:
    seen = []
    for name in ("in full", "checkpointed"):
        subject, trained = LIVE[name]
        bodies = Bodies(subject, components=("net_a",))
        setup = written(bodies, tmp_path / name, trained, 4, {"net_a": 0.5})
        seen.append(run(setup)[2])
    assert equal(*seen)
