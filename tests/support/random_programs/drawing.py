"""Draw a program: the source of a family's module, its inputs, rows, task and trainables."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.random_programs.networks import ENCODERS, EXPERTS, FLAVOURS, NETS

REQUIRED = ""
POSITIVE, NEGATIVE = "positive", "negative"

HEADER = '''"""Program {seed}."""

from collections import OrderedDict
from enum import IntEnum
from typing import TypedDict

import numpy as np
import torch
from dstrain.errors import InputError
from dstrain.graph.inputs import Column, Constant, InferenceOnly, Measured
from dstrain.graph.noise_process import LatentConstraint
from dstrain.graph.values import (Frames)
from PIL import Image
from torch import Tensor

from tests.support.random_programs.networks import count, gather

BUFFER = torch.zeros(1, 4)
FACTOR = {factor}


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Inner(TypedDict):
    left: Tensor
    many: list[Tensor]


class Nested(TypedDict):
    inner: Inner
    size: int
    name: str


def scaled(hidden: Tensor) -> Tensor:
    return hidden * FACTOR


def pixels(hidden: Tensor, *shape: int) -> np.ndarray:
    wave = torch.outer(hidden.detach()[0], torch.arange(1, 7)).cos().flatten()
    shades = (wave * 100 + 120).round().to(torch.uint8).repeat(4)
    return shades[: int(np.prod(shape))].view(shape).numpy()
'''


@dataclass(frozen=True)
class Kind:
    """A kind of output: how it is written and what a batch does with it."""

    annotation: str
    expression: str
    """Of `h`, (1, 4) fp32."""
    joins: bool = True
    """Tensors, of which a batch can be made, whatever they hold."""
    padded: int = 0
    odd: bool = False
    """It is stored exactly or refused."""


RECORD = '{"inner": {"left": h, "many": [h.cos(), h[:, None].expand(1, 2, 4)]}, "size": 4, "name": "four"}'
COMPLEX = "torch.view_as_complex(h.reshape(1, 2, 2).contiguous())"
TENSORS: Mapping[str, Kind] = {
    "plain": Kind("Tensor", "h * 2"),
    "scaled": Kind("Tensor", "scaled(h)"),
    "half_view": Kind("Tensor", "torch.stack([h, 2 * h])[0]"),
    "transposed": Kind("Tensor", "h.reshape(1, 2, 2).transpose(1, 2)"),
    "expanded": Kind("Tensor", "h[:, None].expand(1, 3, 4)"),
    "strided": Kind("Tensor", "torch.cat([h, h.cos()], 1)[:, ::2]"),
    "bf16": Kind("Tensor", "h.to(torch.bfloat16)"),
    "fp16": Kind("Tensor", "h.half()[:, ::2]"),
    "fp64": Kind("Tensor", "h.double()"),
    "int64": Kind("Tensor", "(h * 10).round().long()"),
    "uint8": Kind("Tensor", "(h.abs() * 50).round().to(torch.uint8)"),
    "boolean": Kind("Tensor", "h > 0"),
    "empty": Kind("Tensor", "h.new_zeros(1, 0, 4)"),
    "buffer": Kind("Tensor", "BUFFER.copy_(h.detach())"),
    "buffer_view": Kind("Tensor", "BUFFER.copy_(h.detach())[:, 1:]"),
    "negated": Kind("Tensor", f"{COMPLEX}.conj().imag"),
    "tokens": Kind("Tensor", "h[:, None] * torch.arange(1, 2 + count(h) % 4)[:, None]", padded=1),
    "columns": Kind("Tensor", "h[:, :, None] * torch.arange(1, 2 + count(h) % 3)", padded=2),
    "token_list": Kind("list[Tensor]", "[h[:, None].expand(1, 1 + count(h) % 3, 4), h[:, None]]", padded=1),
    "list": Kind("list[Tensor]", "[h, h.sin()]"),
    "twice": Kind("list[Tensor]", "[h] * 2"),
    "nested_list": Kind("list[list[Tensor]]", "[[h], [h.cos(), h.t().contiguous().t()]]"),
    "record": Kind("Nested", RECORD),
    "records": Kind("list[Inner]", '[{"left": h, "many": []}, {"left": h.cos(), "many": []}]'),
    "empty_list": Kind("list[Tensor]", "[]"),
}  # fmt: skip
OTHERS: Mapping[str, Kind] = {
    "scalar": Kind("Tensor", "h.sum()", False),
    "vacant": Kind("Tensor", "h[:0]", False),
    "pair": Kind("Tensor", "torch.cat([h, h.cos()])", False),
    "ragged": Kind("Tensor", "h[:, : 1 + count(h) % 3]", False),
    "growing": Kind("list[Tensor]", "[h] * (1 + count(h) % 2)", False),
    "str": Kind("str", 'f"saïd {count(h)} " + chr(0x1F600)', False),
    "int": Kind("int", "count(h)", False),
    "big": Kind("int", "10**30 + count(h)", False),
    "float": Kind("float", "count(h) / 7", False),
    "special": Kind("float", '[float("nan"), float("inf"), -0.0][count(h) % 3]', False),
    "bool": Kind("bool", "count(h) % 2 == 0", False),
    "maybe": Kind("Tensor | None", "h if count(h) % 2 else None", False),
    "maybe_str": Kind("str | None", '"" if count(h) % 2 else None', False),
    "texts": Kind("list[str]", '["a"] * (count(h) % 3)', False),
    "rgb": Kind("Image.Image", "Image.fromarray(pixels(h, 2, 3, 3))", False),
    "rgba": Kind("Image.Image", "Image.fromarray(pixels(h, 2, 2, 4))", False),
    "grey": Kind("Image.Image", "Image.fromarray(pixels(h, 3, 2))", False),
    "video": Kind("Frames", "Frames(torch.from_numpy(pixels(h, 2, 1, 3, 3)), 20.0 + count(h) % 3)", False),
}  # fmt: skip
ODD: Mapping[str, Kind] = {
    "complex": Kind("Tensor", COMPLEX, odd=True),
    "conjugated": Kind("Tensor", f"{COMPLEX}.conj()", odd=True),
    "sparse": Kind("Tensor", "h.to_sparse()", False, odd=True),
    "tuple": Kind("list[Tensor]", "(h, h.cos())", odd=True),
    "shape": Kind("list[int]", "h.shape", False, odd=True),
    "np_float32": Kind("float", "np.float32(count(h))", False, odd=True),
    "np_float64": Kind("float", "np.float64(count(h))", False, odd=True),
    "np_int64": Kind("int", "np.int64(count(h))", False, odd=True),
    "np_str": Kind("str", "np.str_(count(h))", False, odd=True),
    "enum": Kind("int", "Level(1 + count(h) % 2)", False, odd=True),
    "ordered": Kind("Inner", "OrderedDict(left=h, many=[h])", odd=True),
    "surrogate": Kind("str", "chr(0xD800) + str(count(h))", False, odd=True),
    "image_P": Kind("Image.Image", 'Image.fromarray(pixels(h, 2, 2)).convert("P")', False, odd=True),
    "image_1": Kind("Image.Image", 'Image.fromarray(pixels(h, 2, 2)).convert("1")', False, odd=True),
    "image_LA": Kind("Image.Image", 'Image.fromarray(pixels(h, 2, 2)).convert("LA")', False, odd=True),
    "image_F": Kind("Image.Image", 'Image.fromarray(pixels(h, 2, 2)).convert("F")', False, odd=True),
    "image_CMYK": Kind("Image.Image", 'Image.fromarray(pixels(h, 2, 2, 3)).convert("CMYK")', False, odd=True),
}  # fmt: skip
ONE_ROW = ("scalar", "vacant", "pair", "sparse")
"""Kinds that a batch of several samples cannot have."""
KINDS = {**TENSORS, **OTHERS, **ODD}
FLOATING = ("plain", "scaled", "half_view", "transposed", "strided", "bf16", "fp64", "tokens", "buffer")  # fmt: skip
WRITES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(FLOATING, ("{0}.add_(1)", "{0}[..., :1] = 3", "{0}.flatten().view(-1).mul_(2).add_(1)")),
    "list": ("{0}.append({0}[0])", "{0}[0] = {0}[1]", "{0}[1].add_(1)", "{0}.clear()"),
    "nested_list": ("{0}[1].pop()", "{0}[0][0].add_(1)"),
    "record": ('{0}["inner"]["left"].add_(1)', '{0}["size"] = 5', '{0}["inner"]["many"].clear()'),
    "texts": ('{0}.append("b")',),
    "video": ("{0}.pixels.add_(1)",),
    "rgb": ("{0}.putpixel((0, 0), (1, 2, 3))",),
    "image": ("{0}.paste(7, (0, 0, 1, 1))",),
    "captions": ('{0}.append("more")',),
    "clip": ("{0}.pixels.add_(1)",),
}  # fmt: skip
"""Kind -> statements that write into a value of it in place."""


@dataclass(frozen=True)
class Function:
    """A function of a program: what its signature says."""

    name: str
    reads: Mapping[str, str]
    """Value -> the source of its default, '' for one that is required."""
    uses: tuple[str, ...] = ()
    makes: Mapping[str, str] = field(default_factory=dict)
    """Output -> kind."""


# The inputs that a program can have: name -> (source of the declaration, kind).
COLUMNS: Mapping[str, str] = {
    "prompt": 'Column("prompt")',
    "negative_prompt": 'Column("negative")',
    "number": 'Column("number", "integer")',
    "ratio": 'Column("ratio", "number")',
    "captions": 'Column("captions", "texts")',
    "style": 'Column("style", same_in_batch=True)',
    "extra": 'Column("extra", optional=True)',
    "image": 'Column("image", "image", mode="{mode}", multiple={multiple})',
    "images": 'Column("images", "images")',
    "clip": 'Column("clip", "video", fps={fps})',
    "first": 'Column("clip", "image", frame="first", mode="{mode}")',
    "last": 'Column("clip", "image", frame="last")',
    "height": 'Measured("image", "height")',
    "width": 'Measured("image", "width")',
    "frames": 'Measured("clip", "frames")',
    "strength": "Constant({constant!r})",
    "hint": "InferenceOnly()",
}
"""Input -> its declaration."""
FILES: Mapping[str, Sequence[str]] = {
    "image": ("small.png", "wide.png", "tall.png", "alpha.png"),
    "clip": ("moving.gif", "folder", "small.png"),
}
OPTIONAL_COLUMNS = ("number", "ratio", "image", "images", "clip")
"""Columns whose cells may be blank, and then the input is absent."""


@dataclass(frozen=True)
class Program:
    """All that was drawn."""

    seed: int
    source: str
    inputs: Mapping[str, str]
    """Input -> its declaration."""
    settings: Mapping[str, Any]
    units: tuple[Function, ...]
    predict: Function
    hold: Function | None
    loss: Function | None
    """None is the loss of flow matching."""
    listed: Mapping[str, str]
    """Inputs of the task: their declarations."""
    branches: tuple[str, ...]
    cfg_inputs: Mapping[str, str]
    has_experts: bool
    flavours: Mapping[str, str]
    """Network -> flavour."""
    trained: Mapping[str, str]
    """Network -> 'full', 'part' or 'lora'."""
    rows: tuple[Mapping[str, Any], ...]
    """Cells by column."""
    dtype: str

    @property
    def padded(self) -> dict[str, int]:
        """Return the axis along which a value is padded."""
        made = {name: kind for unit in self.units for name, kind in unit.makes.items()}
        return {
            name: KINDS[kind].padded
            for name, kind in made.items()
            if kind in KINDS and KINDS[kind].padded
        }

    @property
    def denoisers(self) -> tuple[str, ...]:
        return EXPERTS if self.has_experts else ("dit",)


def present(program: Program, row: Mapping[str, Any]) -> frozenset[str]:
    names = set()
    for name in {**program.inputs, **program.listed}:
        if name in ("hint",) or (
            name == "extra" and not program.settings["asks_extra"]
        ):
            continue
        column = {"negative_prompt": "negative", "first": "clip", "last": "clip", "height": "image",
                  "width": "image", "frames": "clip"}.get(name, name)  # fmt: skip
        is_blank = (
            column in row and row[column] in ("", []) and column in OPTIONAL_COLUMNS
        )
        if name == "strength" or (column in row and not is_blank):
            names.add(name)
    return frozenset(names)


def running(units: Sequence[Function], inputs: frozenset[str]) -> list[Function]:
    """Return the units whose required values there are."""
    values = set(inputs)
    found = []
    for unit in units:
        if all(default or name in values for name, default in unit.reads.items()):
            values |= set(unit.makes)
            found.append(unit)
    return found


def needed(units: Sequence[Function], readers: Sequence[Function]) -> list[Function]:
    """Return the units that the readers ask for, in order."""
    wanted = {name for reader in readers for name in reader.reads}
    found: list[Function] = []
    for unit in reversed(units):
        if wanted & set(unit.makes):
            wanted |= set(unit.reads)
            found.append(unit)
    return found[::-1]


class Draw(random.Random):
    def chance(self, probability: float) -> bool:
        return self.random() < probability


def draw_program(seed: int) -> Program:
    draw = Draw(f"second/{seed}")
    batch_size = draw.choice((1, 1, 2, 2, 3, 4))
    has_odd, has_write = draw.chance(0.12), draw.chance(0.12)
    declarations = {"mode": draw.choice(("RGB", "RGBA", "L")), "multiple": draw.choice((0, 2)),
                    "fps": draw.choice((0.0, 5.0)), "constant": draw.choice((3, 0.5, "word"))}  # fmt: skip
    chosen = {"prompt", *draw.sample(sorted(COLUMNS), draw.randint(3, 9))}
    chosen |= {"image"} if chosen & {"height", "width"} else set()
    chosen |= {"clip"} if chosen & {"frames"} else set()
    branches = (POSITIVE, NEGATIVE) if draw.chance(0.4) else (POSITIVE,)
    cfg_inputs = {}
    if NEGATIVE in branches or draw.chance(0.3):
        chosen.add("negative_prompt")
        cfg_inputs = {"prompt": "negative_prompt"}
    inputs = {name: COLUMNS[name].format(**declarations) for name in sorted(chosen)}
    listed = {}
    if draw.chance(0.2):
        listed = {"score": 'Column("score", "number")'}
    has_own_loss = bool(listed) or NEGATIVE in branches or draw.chance(0.4)
    settings = {
        "batch_size": batch_size,
        "accumulation": draw.choice((1, 1, 2, 3)),
        "repeat": draw.choice((1, 1, 1, 2)),
        "epochs": draw.choice((1, 1, 1, 2)),
        "num_frames": draw.choice((2, 3)),
        "frame_sampling": draw.choice(("head", "chunk", "uniform")),
        "asks_extra": "extra" in chosen and draw.chance(0.5),
        "seed": draw.randint(0, 99),
        "timestep_sampling": draw.choice(
            ("shifted", "logit_normal", "uniform", "mode")
        ),
        "loss_weighting": draw.choice(("bsmntw", "none")),
        **declarations,
    }
    rows = [
        draw_row(draw, settings["asks_extra"], batch_size)
        for _ in range(draw.randint(1, 4))
    ]
    flavours = {name: draw.choice((*FLAVOURS, "plain")) for name in NETS}
    kinds: dict[str, str] = {
        name: {"clip": "clip", "image": "image", "captions": "captions"}.get(name, "")
        for name in inputs
    }
    sources, units = [], []
    for i in range(draw.randint(2, 7)):
        source, unit = draw_unit(draw, i, kinds, has_odd, has_write)
        sources.append(source)
        units.append(unit)
        kinds |= unit.makes
    # The latents, which the loss reads.
    source, unit = draw_latents(draw, kinds)
    sources.append(source)
    units.append(unit)
    kinds["input_latents"] = "plain"
    has_experts = draw.chance(0.25)
    denoiser = "dit"
    joinable = {}
    for name, kind in kinds.items():
        is_joined = kind in KINDS and KINDS[kind].joins
        chance = 1.0 if is_joined or batch_size == 1 else 0.1
        if kind in ONE_ROW:
            chance = 0.05
        if draw.chance(chance):
            joinable[name] = kind
    joinable.pop("input_latents", None)
    program = Program(
        seed, "", inputs, settings, tuple(units), Function("predict", {}), None, None, listed, branches,
        cfg_inputs, has_experts, flavours, {}, tuple(rows), draw.choice(("no",) * 5 + ("bf16",)),
    )  # fmt: skip
    everywhere = set(joinable)
    for row in rows:
        inputs_of_row = present(program, row)
        values = set(inputs_of_row)
        for one in running(units, inputs_of_row):
            values |= set(one.makes)
        everywhere &= values

    def step_reads(most: int) -> dict[str, str]:
        names = draw.sample(sorted(joinable), min(len(joinable), draw.randint(0, most)))
        return {
            n: REQUIRED
            if n in everywhere and draw.chance(0.7)
            else draw.choice(("None", "0.5", '"x"'))
            for n in names
        }

    predict = Function(
        "predict",
        ordered(step_reads(4)),
        (denoiser, *(("branch",) if draw.chance(0.3) else ())),
    )
    if draw.chance(0.1):
        predict = Function(
            "predict", predict.reads, (*predict.uses, draw.choice(ENCODERS))
        )
    hold = Function("hold", ordered(step_reads(1))) if draw.chance(0.3) else None
    loss = None
    if has_own_loss:
        reads = {
            "input_latents": REQUIRED,
            **step_reads(2),
            **dict.fromkeys(listed, REQUIRED),
        }
        teachers = tuple(draw.sample(ENCODERS, draw.choice((0, 0, 1))))
        loss = Function(
            "loss",
            ordered(reads),
            (*teachers, "rng", "timestep_sampler", "constrain_latents"),
        )
    sources.append(predict_source(draw, predict))
    if hold is not None:
        sources.append(hold_source(draw, hold))
    if loss is not None:
        sources.append(loss_source(loss, listed, branches))
    for table, declared in (("INPUTS", inputs), ("TASK_INPUTS", listed)):
        lines = [f'    "{name}": {text},\n' for name, text in declared.items()]
        sources.append(f"\n\n{table} = {{\n{''.join(lines)}}}\n")
    body = HEADER.format(seed=seed, factor=draw.randint(2, 9)) + "".join(sources)
    base = {
        **vars(program),
        "source": body,
        "predict": predict,
        "hold": hold,
        "loss": loss,
    }
    drawn = Program(**base)
    trained = draw_trained(draw, drawn)
    dtype = drawn.dtype if "part" not in trained.values() else "no"
    return Program(**{**base, "trained": trained, "dtype": dtype})


def ordered(reads: Mapping[str, str]) -> dict[str, str]:
    """Return required reads before those with a default, as a signature has them."""
    return dict(sorted(reads.items(), key=lambda item: bool(item[1])))


def readers_of(program: Program) -> list[Function]:
    loss = program.loss or Function("flow_match", {"input_latents": REQUIRED})
    return [program.predict, *([program.hold] if program.hold else []), loss]


def draw_trained(draw: Draw, program: Program) -> dict[str, str]:
    """Choose what is trained among what each row's step uses."""
    usable = set(ENCODERS)
    for row in program.rows:
        units = running(program.units, present(program, row))
        functions = [*needed(units, readers_of(program)), *readers_of(program)]
        usable &= {name for function in functions for name in function.uses}
    pool = sorted(usable)
    names = set(draw.sample(pool, min(len(pool), draw.choice((0, 0, 1, 2)))))
    if not names or draw.chance(0.7):
        names |= set(
            draw.sample(program.denoisers, draw.randint(1, len(program.denoisers)))
        )
    return {
        name: draw.choice(("full", "full", "part", "lora", "lora"))
        for name in sorted(names)
    }


def draw_row(draw: Draw, asks_extra: bool, batch_size: int) -> dict[str, Any]:
    is_varied = draw.chance(0.5)
    return {
        "prompt": draw.choice(("", "a dog", "a dog", "two cats on a roof", "Füße 😀")),
        "negative": draw.choice(("", "blurry")),
        "number": draw.choice(("", "7", "-3")) if is_varied else "7",
        "ratio": draw.choice(("", "0.5", "2.25")) if is_varied else "0.5",
        "captions": draw.choice(([], ["one"], ["one", "two"])),
        "style": draw.choice(("oil", "ink")),
        "extra": "more" if asks_extra else "",
        "image": draw.choice(("", *FILES["image"])) if is_varied else "small.png",
        "images": draw.choice(([], ["small.png"], ["wide.png", "small.png"]))
        if is_varied
        else ["small.png"],
        "clip": draw.choice(("", *FILES["clip"])) if is_varied else "moving.gif",
        "score": draw.choice(("0.5", "1.5")),
    }


def signature(
    function: Function, first: str = "", kinds: Mapping[str, str] | None = None
) -> str:
    parameters = [first] if first else []
    parameters += [
        f"{name}={default}" if default else name
        for name, default in function.reads.items()
    ]
    if function.uses:
        parameters += ["*", *function.uses]
    return ", ".join(parameters)


def computed(draw: Draw, function: Function, start: str) -> list[str]:
    """Write how `h` is made from all that a function is given."""
    lines = [f"h = {start}"]
    for name in function.uses:
        if name in (*NETS, "dit"):
            lines.append(f"h = {name}(h)")
        elif name.endswith("_config"):
            lines.append(f'h = h + {name}["shift"]')
        elif name == "branch":
            lines.append('h = h * (2 if branch == "negative" else 1)')
        elif name == "dtype":
            lines.append("h = h.to(dtype).float()")
        elif name == "rng":
            lines.append('h = h + rng.normal("jitter", (4,))')
            if draw.chance(0.3):
                lines.append(
                    'h = h * rng.uniform("jitter") + rng.normal("other", (1,))'
                )
    return lines


def function_text(head: str, lines: Sequence[str]) -> str:
    return f"\n\n{head}\n" + "".join(f"    {line}\n" for line in lines)


def draw_unit(
    draw: Draw, i: int, kinds: Mapping[str, str], has_odd: bool, has_write: bool
) -> tuple[str, Function]:
    """Draw a unit that reads some of the values so far."""
    names = list(kinds)
    if draw.chance(0.7):
        names = names[-6:]
    names = draw.sample(names, min(len(names), draw.randint(0 if i else 1, 3)))
    reads = {
        n: REQUIRED
        if draw.chance(0.6)
        else draw.choice(("None", "None", "0.25", '"none"'))
        for n in names
    }
    uses = [*draw.sample(ENCODERS, draw.choice((0, 1, 1, 2)))]
    for name, chance in (
        ("rng", 0.15),
        ("branch", 0.12),
        ("enc_a_config", 0.15),
        ("dit_config", 0.1),
        ("dtype", 0.1),
    ):
        if draw.chance(chance):
            uses.append(name)
    makes, lines = {}, []
    pool = [*TENSORS, *TENSORS, *OTHERS] + (list(ODD) * 2 if has_odd else [])
    for number in range(draw.randint(1, 3)):
        kind = draw.choice(pool)
        name = f"{kind}_{i}" if number == 0 else f"{kind}_{i}{number}"
        expression = KINDS[kind].expression
        makes[name] = kind
        lines.append(
            (
                name,
                KINDS[kind].annotation,
                f"(lambda h: {expression})(h * {number + 1})",
            )
        )
    required = [name for name, default in reads.items() if not default]
    if required and draw.chance(0.2):
        # The value itself, or a view of it.
        source = draw.choice(required)
        expression = source
        if (
            kinds[source] in TENSORS
            and KINDS[kinds[source]].annotation == "Tensor"
            and draw.chance(0.5)
        ):
            expression = f"{source}[None][0]"
        name = f"alias_{i}"
        if kinds[source] in KINDS:
            makes[name] = kinds[source]
            lines.append((name, KINDS[kinds[source]].annotation, expression))
    function = Function(f"unit_{i}", ordered(reads), tuple(uses), makes)
    # One row, also of values that have several or none.
    body = computed(
        draw, function, f"gather({', '.join(function.reads)}).mean(0, keepdim=True)"
    )
    own = [
        name
        for name, kind in makes.items()
        if not name.startswith("alias")
        and kind in ("plain", "scaled", "transposed", "strided")
    ]
    networks = [name for name in uses if name in ENCODERS]
    if networks and draw.chance(0.15):
        makes[f"weight_{i}"] = "plain"
        lines.append((f"weight_{i}", "Tensor", f"{networks[0]}.last.bias[None]"))
    for name, _, expression in lines:
        body.append(f"{name} = {expression}")
    if own and draw.chance(0.3):
        # What a unit writes into its own outputs is nobody else's; a view of one shares its storage.
        makes[f"shared_{i}"] = "plain"
        body += [f"shared_{i} = {own[0]}.flatten(1)", f"{own[0]}.add_(1)"]
        lines.append((f"shared_{i}", "Tensor", ""))
    if draw.chance(0.03):
        body.insert(
            1,
            f'if count(h) % 3 == 0:\n        raise InputError("unit_{i}", "cannot use this")',
        )
    writable = [name for name in reads if kinds[name] in WRITES]
    if has_write and writable and draw.chance(0.6):
        victim = draw.choice(writable)
        statement = draw.choice(WRITES[kinds[victim]]).format(victim)
        condition = f"{victim} not in (None, 0.25, 'none')" if reads[victim] else "True"
        if reads[victim]:
            condition = f"not isinstance({victim}, float | str | None)"
        if draw.chance(0.4):
            condition += " and count(h) % 2"
        body.append(f"if {condition}:\n        {statement}")
    body.append("return {" + ", ".join(f'"{name}": {name}' for name in makes) + "}")
    fields = "".join(f"    {name}: {annotation}\n" for name, annotation, _ in lines)
    text = f"\n\nclass Made{i}(TypedDict):\n{fields}"
    text += function_text(f"def unit_{i}({signature(function)}) -> Made{i}:", body)
    return text, function


def draw_latents(draw: Draw, kinds: Mapping[str, str]) -> tuple[str, Function]:
    """Draw the unit whose output is `input_latents`."""
    pool = [name for name, kind in kinds.items() if kind]
    reads = dict.fromkeys(draw.sample(pool, min(len(pool), draw.randint(1, 3))), "None")
    uses = draw.sample(ENCODERS, draw.choice((0, 1)))
    makes = {"input_latents": "plain"}
    function = Function("encode", reads, tuple(uses), makes)
    body = computed(draw, function, f"gather({', '.join(reads)}).mean(0, keepdim=True)")
    latents = draw.choice(("h", "h", "h.half()", "h.bfloat16()", "h[:1, :]"))
    body.append(f'return {{"input_latents": {latents}}}')
    text = "\n\nclass MadeLatents(TypedDict):\n    input_latents: Tensor\n"
    return text + function_text(
        f"def encode({signature(function)}) -> MadeLatents:", body
    ), function


def predict_source(draw: Draw, predict: Function) -> str:
    start = f"noisy_latents + timestep.view(-1, 1) / 1000 + gather({', '.join(predict.reads)})"
    body = [*computed(draw, predict, start), "return h"]
    return function_text(
        f"def predict({signature(predict, 'noisy_latents, timestep')}):", body
    )


def hold_source(draw: Draw, hold: Function) -> str:
    start = f"latents + 0.1 * gather({', '.join(hold.reads)}) + 0.1 * noise"
    mask = draw.choice(("", ", torch.tensor([[1.0, 0.0, 1.0, 1.0]])"))
    body = [f"return LatentConstraint({start}, timestep{mask})"]
    return function_text(
        f"def hold({signature(hold, 'latents, timestep, noise')}):", body
    )


def loss_source(
    loss: Function, listed: Mapping[str, str], branches: Sequence[str]
) -> str:
    joined = [name for name in loss.reads if name not in listed]
    body = [
        "sigma = timestep_sampler.draw(rng)",
        'noise = rng.normal("noise", (4,))',
        f"clean = gather({', '.join(joined)})",
        *(f"clean = {name}(clean)" for name in loss.uses if name in ENCODERS),
        *(
            f"clean = clean + torch.cat([gather(one) for one in {name}])"
            for name in listed
        ),
        "held = constrain_latents(clean + sigma[:, None] * noise, sigma * 1000, noise)",
        "total = torch.zeros(())",
        f"for branch in {tuple(branches)!r}:",
        "    error = predict(held.latents, held.timestep, branch).float() - noise",
        "    total = total + error.square().mean(1)",
        "return timestep_sampler.weight(sigma) * total",
    ]
    return function_text(f"def loss({signature(loss, 'predict')}):", body)
