"""Compute a program by calling its functions one after the other.

Every function gets values of its own, so that nothing it does to them reaches another.
Random numbers come from the keys, masks of dropout from the notes of the run compared.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from dstrain import DstrainError, Frames, Rng, SampleKey, TimestepSampler
from dstrain.plugin import FlowMatchSchedule
from PIL import Image, ImageOps
from torch import Tensor, nn

from tests.support.random_programs.drawing import (
    EXPERTS,
    KINDS,
    POSITIVE,
    Function,
    Program,
    needed,
    present,
    readers_of,
    running,
)
from tests.support.random_programs.networks import (
    Dropout,
    Network,
    network_file,
    read_network,
)

LORA_RANK, LORA_ALPHA = 2, 3.0
BOUNDARY = 500.0
SCHEDULE = FlowMatchSchedule(shift=3.0)


class Refused(Exception):
    """dstrain must refuse this program, and its message must have `names`."""

    def __init__(self, reason: str, *names: str) -> None:
        super().__init__(reason)
        self.names = names


class WithLora(nn.Module):
    """A layer and the low-rank change to it."""

    def __init__(self, layer: nn.Linear, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(down.clone())
        self.up = nn.Parameter(up.clone())

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        low = nn.functional.linear(x.to(self.down.dtype), self.down)
        change = nn.functional.linear(low, self.up) * (LORA_ALPHA / LORA_RANK)
        return (y + change).to(y.dtype)


def plain_name(parameter: str) -> str:
    """Return the evaluator's name of a parameter."""
    return parameter.removesuffix(".default.weight")


@dataclass
class Evaluator:
    """A program with networks of its own."""

    program: Program
    module: ModuleType
    media: Path
    networks: dict[str, Network] = field(default_factory=dict)
    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    odd: set[str] = field(default_factory=set)
    """The odd kinds that were met."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.program.dtype == "bf16" else torch.float32

    def load(self, start: Mapping[str, Tensor]) -> None:
        """Read the networks; `start` has the trained parameters as the run compared begins."""
        for name, flavour in self.program.flavours.items():
            how = self.program.trained.get(name)
            dtype = torch.float32 if how == "full" else self.dtype
            network = read_network(
                network_file(self.media, name, flavour), flavour, dtype
            )
            network.requires_grad_(False).eval()
            if how == "full":
                network.requires_grad_(True).train()
                self.trained |= {
                    f"{name}.{key}": one for key, one in network.named_parameters()
                }
            elif how == "part":
                network.first.requires_grad_(True).train()
                self.trained |= {
                    f"{name}.first.{key}": one
                    for key, one in network.first.named_parameters()
                }
            elif how == "lora":
                beginning = f"{name}.first.lora_"
                down, up = (start[f"{beginning}{part}.default.weight"] for part in "AB")
                network.first = WithLora(network.first, down, up)
                self.trained |= {
                    f"{beginning}A": network.first.down,
                    f"{beginning}B": network.first.up,
                }
                network.train()
            self.networks[name] = network

    def load_frozen(self) -> None:
        """Read the networks for units that training does not change."""
        for name, flavour in self.program.flavours.items():
            path = network_file(self.media, name, flavour)
            self.networks[name] = read_network(path, flavour, self.dtype).eval()

    @torch.no_grad()
    def set_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Continue with these trained parameters."""
        for name, value in parameters.items():
            self.trained[plain_name(name)].copy_(value)

    def replay(self, masks: Mapping[str, Sequence[Tensor]]) -> None:
        for name, network in self.networks.items():
            assert isinstance(network.drop, Dropout)
            network.drop.replayed = deque(masks.get(name, ()))

    # Which functions a row runs.

    def functions(
        self, inputs: frozenset[str]
    ) -> tuple[list[Function], list[Function]]:
        """Return the units of a row: those that training cannot change, and the others."""
        frozen, live = [], []
        moving = {"rng", *self.program.trained}
        values: set[str] = set()
        for unit in needed(
            running(self.program.units, inputs), readers_of(self.program)
        ):
            if moving & set(unit.uses) or values & set(unit.reads):
                values |= set(unit.makes)
                live.append(unit)
            else:
                frozen.append(unit)
        return frozen, live

    @cached_property
    def by_branch(self) -> set[str]:
        """Return the values that differ between the branches."""
        names = set(self.program.cfg_inputs)
        for unit in self.program.units:
            if names & set(unit.reads) or "branch" in unit.uses:
                names |= set(unit.makes)
        return names

    def runs(self, unit: Function) -> Sequence[str]:
        return self.program.branches if set(unit.makes) & self.by_branch else ("",)

    def reading(self, name: str, branch: str) -> str:
        """Return the name under which dstrain keeps what a branch reads as `name`."""
        if branch in ("", POSITIVE) or name not in self.by_branch:
            return name
        return self.program.cfg_inputs.get(name, f"{branch}.{name}")

    def read_by(
        self, function: Function, branch: str, inputs: frozenset[str]
    ) -> set[str]:
        """Return what a function reads of a row, by dstrain's names."""
        units = running(self.program.units, inputs)
        there = set(inputs).union(*(unit.makes for unit in units))
        keys = {self.reading(name, branch) for name in function.reads if name in there}
        return keys - ({*self.program.inputs} - inputs)

    def read_in_step(self, inputs: frozenset[str]) -> set[str]:
        """Return what the functions of the step itself read of a row."""
        predict, *others = readers_of(self.program)
        keys: set[str] = set()
        for branch in self.program.branches:
            keys |= self.read_by(predict, branch, inputs)
        for reader in others:
            keys |= self.read_by(reader, POSITIVE, inputs)
        return keys

    def calls(self, inputs: frozenset[str]) -> list[tuple[Function, str, bool]]:
        """Return the calls of units for a row: unit, branch, whether it changes in training."""
        frozen, live = self.functions(inputs)
        wanted = self.read_in_step(inputs)
        found = []
        for unit in reversed(self.program.units):
            if unit not in frozen and unit not in live:
                continue
            for branch in reversed(self.runs(unit)):
                if wanted & {self.reading(name, branch) for name in unit.makes}:
                    wanted |= self.read_by(unit, branch, inputs)
                    found.append((unit, branch, unit in live))
        return found[::-1]

    def cached_names(self, inputs: frozenset[str]) -> set[str]:
        """Return the values of a row that training reads and does not compute."""
        read = self.read_in_step(inputs)
        made = set()
        for unit, branch, is_live in self.calls(inputs):
            if is_live:
                read |= self.read_by(unit, branch, inputs)
                made |= {self.reading(name, branch) for name in unit.makes}
        return read - made

    def loaded(self, stage: str) -> set[str]:
        """Return the networks that a stage needs."""
        names: set[str] = set()
        for row in self.program.rows:
            frozen, live = self.functions(present(self.program, row))
            for unit in frozen if stage == "data_process" else live:
                names |= set(unit.uses)
            if stage == "train":
                for reader in readers_of(self.program):
                    names |= set(reader.uses)
        if "dit" in names and self.program.has_experts:
            names |= set(self.experts)
            names.discard("dit")
        return names & {*self.networks}

    @property
    def experts(self) -> list[str]:
        trained = [name for name in EXPERTS if name in self.program.trained]
        return trained or list(EXPERTS)

    # The values of a sample.

    @cached_property
    def samples(self) -> list[tuple[int, int]]:
        """Return (row, chunk) of each sample."""
        rows = enumerate(self.program.rows)
        return [(i, chunk) for i, row in rows for chunk in range(len(self.chunks(row)))]

    def chunks(self, row: Mapping[str, Any]) -> list[range]:
        program = self.program
        videos = {"clip", "first", "last"} & set(program.inputs)
        if not videos or not row["clip"]:
            return [range(0)]
        total = len(self.frames_shown(row["clip"]))
        length = program.settings["num_frames"]
        if total < length:
            return [range(total)]
        starts = [0]
        if program.settings["frame_sampling"] == "chunk":
            starts = list(range(0, total - length + 1, length))
        elif program.settings["frame_sampling"] == "uniform":
            starts = sorted({0, total - length})
        return [range(start, start + length) for start in starts]

    def frames_shown(self, name: str) -> list[int]:
        """Return the frames of a file at the rate of its column; a GIF has 10 per second."""
        path = self.media / name
        if path.is_dir():
            return list(range(len(list(path.iterdir()))))
        with Image.open(path) as image:
            total = getattr(image, "n_frames", 1)
        if (
            total > 1
            and self.program.settings["fps"] == 5.0
            and "clip" in self.program.inputs
        ):
            return list(range(0, total, 2))
        return list(range(total))

    def cells(self, row: Mapping[str, Any], chunk: int) -> dict[str, Any]:
        """Return the inputs of a sample, decoded."""
        names = present(self.program, row)
        settings = self.program.settings
        values: dict[str, Any] = {}
        if names & {"clip", "first", "last"}:
            shown = self.frames_shown(row["clip"])
            images = [
                self.frame(row["clip"], shown[i]) for i in self.chunks(row)[chunk]
            ]
            pixels = torch.from_numpy(
                np.stack([np.array(image.convert("RGB")) for image in images])
            )
            own = 10.0 if row["clip"].endswith(".gif") else 0.0
            values["clip"] = Frames(pixels, settings["fps"] or own)
            values["first"] = images[0].convert("RGB").convert(settings["mode"])
            values["last"] = images[-1].convert("RGB")
            values["frames"] = len(images)
        if "image" in names:
            values["image"] = self.image(
                row["image"], settings["mode"], settings["multiple"]
            )
            values["width"], values["height"] = values["image"].size
        if "images" in names:
            values["images"] = [self.image(name, "RGB", 0) for name in row["images"]]
        for name, kind in {"number": int, "ratio": float, "score": float}.items():
            if name in names:
                values[name] = kind(row[name])
        values["prompt"], values["negative_prompt"] = row["prompt"], row["negative"]
        for name in ("captions", "style", "extra"):
            values[name] = row[name]
        values["strength"] = settings["constant"]
        return {name: values[name] for name in names}

    def frame(self, name: str, index: int) -> Image.Image:
        path = self.media / name
        if path.is_dir():
            path = path / f"{index}.png"
        with Image.open(path) as image:
            if getattr(image, "n_frames", 1) > 1:
                image.seek(index)
            return image.convert("RGB")

    def image(self, name: str, mode: str, multiple: int) -> Image.Image:
        with Image.open(self.media / name) as opened:
            opened.load()
            image: Image.Image = opened
            if image.mode == "RGBA" and mode != "RGBA":
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image).convert("RGB")
            image = image.convert(mode)
        if multiple:
            width, height = image.size
            size = (width - width % multiple, height - height % multiple)
            image = (
                image
                if size == image.size
                else ImageOps.fit(image, size, Image.Resampling.LANCZOS)
            )
        return image

    def values(self, key: SampleKey, stages: str = "both") -> dict[str, Any]:
        """Return the values of a sample by dstrain's names; raise Refused."""
        row = self.program.rows[key.row]
        table = self.cells(row, key.chunk)
        inputs = frozenset(table)
        for unit, branch, is_live in self.calls(inputs):
            if stages == "both" or not is_live:
                made = self.call(unit, branch, table, key)
                table |= {
                    self.reading(name, branch): value for name, value in made.items()
                }
        return table

    def call(
        self, unit: Function, branch: str, table: Mapping[str, Any], key: SampleKey
    ) -> dict[str, Any]:
        """Call a unit, and see that it leaves alone what it reads."""
        given = {
            name: table[self.reading(name, branch)]
            for name in unit.reads if self.reading(name, branch) in table
        }  # fmt: skip
        lent = {name: own(value) for name, value in given.items()}
        before = {name: own(value) for name, value in given.items()}
        rng = Rng([key]).scoped(f"{unit.name}.{branch}")
        context = {"rng": rng, "branch": branch or POSITIVE, "dtype": self.dtype}
        try:
            outputs = getattr(self.module, unit.name)(
                **lent, **self.used(unit, context)
            )
        except DstrainError as error:
            raise Refused("it says so itself", unit.name) from error
        for name, value in lent.items():
            if not same(value, before[name]):
                raise Refused("a unit writes into what it reads", unit.name, repr(name))
        self.odd |= {kind for name, kind in unit.makes.items() if KINDS[kind].odd}
        made: dict[str, Any] = own(outputs)
        return made

    def used(
        self, function: Function, context: Mapping[str, Any], expert: str = ""
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in function.uses:
            component = name.removesuffix("_config")
            if component == "dit" and self.program.has_experts:
                component = expert or self.experts[0]
            if name in context:
                found[name] = context[name]
            elif name.endswith("_config"):
                names = [*self.networks]
                found[name] = {"shift": 0.1 * (names.index(component) + 1)}
            else:
                found[name] = self.networks[component]
        return found

    # A batch.

    def losses(self, keys: Sequence[SampleKey]) -> Tensor:
        """Return the loss of each sample of a batch; raise Refused."""
        program = self.program
        tables = [self.values(key) for key in keys]

        def joined(
            function: Function, branch: str, rows: Sequence[int]
        ) -> dict[str, Any]:
            found = {}
            for name in function.reads:
                key = self.reading(name, branch)
                if key not in tables[0]:
                    continue
                values = [own(tables[row][key]) for row in rows]
                if name in program.listed:
                    found[name] = values
                else:
                    found[name] = join(name, values, program.padded.get(name))
            return found

        everyone = range(len(keys))
        for function in readers_of(program):
            for branch in (
                program.branches if function is program.predict else (POSITIVE,)
            ):
                joined(function, branch, everyone)

        def predict_with(
            expert: str,
            latents: Tensor,
            timestep: Tensor,
            branch: str,
            rows: Sequence[int],
        ) -> Tensor:
            context = {"branch": branch, "dtype": self.dtype}
            conditions = joined(program.predict, branch, rows)
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=self.dtype != torch.float32
            ):
                result: Tensor = self.module.predict(
                    latents, timestep, **conditions,
                    **self.used(program.predict, context, expert),
                )  # fmt: skip
            return result

        def predict(
            latents: Tensor, timestep: Tensor, branch: str = POSITIVE
        ) -> Tensor:
            prediction = predict_all(latents, timestep, branch)
            if prediction.shape != latents.shape:
                raise Refused("a prediction of another shape", "predict")
            return prediction

        def predict_all(latents: Tensor, timestep: Tensor, branch: str) -> Tensor:
            if not program.has_experts or len(self.experts) == 1:
                return predict_with("", latents, timestep, branch, everyone)
            chosen = [
                "dit_high" if one >= BOUNDARY else "dit_low"
                for one in timestep.tolist()
            ]
            parts: dict[int, Tensor] = {}
            for expert in dict.fromkeys(chosen):
                rows = [row for row in everyone if chosen[row] == expert]
                part = predict_with(expert, latents[rows], timestep[rows], branch, rows)
                parts.update(zip(rows, part, strict=True))
            return torch.stack([parts[row] for row in everyone])

        def hold(latents: Tensor, timestep: Tensor, noise: Tensor) -> Any:
            if program.hold is None:
                return self.module.LatentConstraint(latents, timestep)
            return self.module.hold(
                latents, timestep, noise, **joined(program.hold, POSITIVE, everyone)
            )

        sampler = self.timesteps()
        rng = Rng(keys)
        if program.loss is not None:
            context = {
                "rng": rng,
                "timestep_sampler": sampler,
                "constrain_latents": hold,
            }
            given = joined(program.loss, POSITIVE, everyone)
            result: Tensor = self.module.loss(
                predict, **given, **self.used(program.loss, context)
            )
            if result.shape != (len(keys),):
                raise Refused("not one loss per sample", "loss")
            return result
        clean = join(
            "input_latents", [table["input_latents"] for table in tables], None
        )
        sigma = sampler.draw(rng)
        noise = rng.normal("noise", (4,))
        level = sigma[:, None]
        constrained = hold((1 - level) * clean + level * noise, sigma * 1000, noise)
        error = predict(constrained.latents, constrained.timestep).float() - (
            noise - clean
        )
        mask = torch.ones(()) if constrained.mask is None else constrained.mask
        weight = mask.expand_as(error)
        return sampler.weight(sigma) * (error.square() * weight).sum(1) / weight.sum(1)

    def timesteps(self) -> TimestepSampler:
        settings = self.program.settings
        low, high = 0.0, 1.0
        if self.program.has_experts and len(self.experts) == 1:
            share = int((SCHEDULE.table >= BOUNDARY / 1000).sum()) / 1000
            low, high = (0.0, share) if self.experts == ["dit_high"] else (share, 1.0)
        return TimestepSampler(
            SCHEDULE,
            settings["timestep_sampling"],
            settings["loss_weighting"],
            low,
            high,
        )


def own(value: Any) -> Any:
    """Return a value that shares memory with no other, and has the same gradient."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.detach().clone()
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, Frames):
        return Frames(own(value.pixels), value.fps)
    if type(value) in (list, tuple):
        return type(value)(own(item) for item in value)
    if isinstance(value, dict):
        return {name: own(item) for name, item in value.items()}
    if isinstance(value, Image.Image):
        return value.copy()
    return deepcopy(value)


def join(name: str, values: Sequence[Any], padded: int | None) -> Any:
    """Return the value of a batch; raise Refused."""
    first, *others = values
    if not others:
        return first
    if any(type(value) is not type(first) for value in others):
        raise Refused("several kinds", name)
    if isinstance(first, Tensor):
        if any(value.ndim == 0 or len(value) != 1 for value in values):
            raise Refused("not one row per sample", name)
        if padded:
            longest = max(value.shape[padded] for value in values)
            values = [pad(value, padded, longest) for value in values]
        if any(
            (value.shape, value.dtype) != (values[0].shape, first.dtype)
            for value in values
        ):
            raise Refused("several shapes or dtypes", name)
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {key: join(key, [value[key] for value in values], None) for key in first}
    if isinstance(first, list):
        if any(len(value) != len(first) for value in others):
            raise Refused("several lengths", name)
        return [join(name, items, padded) for items in zip(*values, strict=True)]
    if any(not same(value, first) for value in others) or first != first:
        raise Refused("several values", name)
    return first


def pad(value: Tensor, axis: int, length: int) -> Tensor:
    shape = list(value.shape)
    shape[axis] = length - shape[axis]
    return torch.cat([value, value.new_zeros(shape)], axis)


def same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.is_complex():
            a, b = (torch.view_as_real(one.resolve_conj()) for one in (a, b))
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, Frames):
        return same(a.pixels, b.pixels) and a.fps == b.fps
    if isinstance(a, Image.Image):
        return a.mode == b.mode and a.size == b.size and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)
