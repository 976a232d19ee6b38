"""Split equivalence of random programs, which an evaluator of its own computes, too."""

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from dstrain import (
    SFT,
    Batch,
    DstrainError,
    LoraConfig,
    ModelConfig,
    SampleKey,
    Task,
    Trainables,
    TrainConfig,
    TrainingModule,
    UsageError,
)
from dstrain.distributed import ProcessGroup
from dstrain.plugin import Component, ExpertSchedule, Files, ModelFamily, PipelineSpec
from dstrain.registry import load_extensions
from dstrain.runs import Setup, data_process, open_training_data, prepare
from dstrain.training import split_across_ranks
from PIL import Image
from torch import Tensor, nn

from tests.support.random_programs.drawing import (
    KINDS,
    ODD,
    Program,
    draw_program,
    present,
)
from tests.support.random_programs.evaluator import (
    BOUNDARY,
    LORA_ALPHA,
    LORA_RANK,
    SCHEDULE,
    Evaluator,
    Refused,
    plain_name,
    same,
)
from tests.support.random_programs.networks import (
    FLAVOURS,
    NETS,
    EndOfNotes,
    Network,
    network_file,
    read_network,
    write_networks,
)

PROGRAMS = range(2000)
"""Seeds of the programs that `tests/support/random_programs/drawing.py` draws."""
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Record(ModelFamily):
    """A family that is not installed anywhere: its components are at hand."""

    parts: tuple[Component, ...] = ()

    def load(self, part: str) -> Any:
        assert part == "components"
        return self.parts


LOADED: list[str] = []
"""The networks that were loaded, in order."""


def load(files: Files, config: Mapping[str, Any], dtype: torch.dtype) -> Network:
    LOADED.append(files.paths[0].stem.rpartition("_")[0])
    return read_network(files.paths[0], config["flavour"], dtype)


RECORD = Record(
    "second", "", "", "", ("base",), "dit", MappingProxyType({}), MappingProxyType({}),
    parts=tuple(Component(name, SimpleNamespace(load=load), name, (f"{name}.*",)) for name in NETS),
)  # fmt: skip


def write_media(folder: Path) -> None:
    """Write the networks, images and videos that all programs share."""
    write_networks(folder)
    noise = np.random.default_rng(0)

    def picture(width: int, height: int, channels: int = 3) -> Image.Image:
        return Image.fromarray(
            noise.integers(0, 256, (height, width, channels), np.uint8)
        )

    picture(4, 4).save(folder / "small.png")
    picture(7, 4).save(folder / "wide.png")
    picture(4, 5).save(folder / "tall.png")
    picture(4, 4, 4).save(folder / "alpha.png")
    (folder / "folder").mkdir()
    for i in range(4):
        picture(4, 2).save(folder / "folder" / f"{i}.png")
    first, *others = [picture(4, 2) for _ in range(5)]
    first.save(folder / "moving.gif", save_all=True, append_images=others, duration=100)


@contextmanager
def imported(program: Program, folder: Path, source: str) -> Iterator[ModuleType]:
    """Write the program's module and import it, as that of an installed family."""
    name = f"random_program_{program.seed}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    made = importlib.util.spec_from_file_location(name, path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    sys.modules[name] = module
    try:
        made.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def set_up(program: Program, module: ModuleType, media: Path, folder: Path) -> Setup:
    settings = program.settings
    (folder / "metadata.json").write_text(
        json.dumps(list(program.rows)), encoding="utf-8"
    )
    experts = None
    if program.has_experts:
        experts = ExpertSchedule(
            "dit", {"dit_high": (BOUNDARY, 1000.0), "dit_low": (0.0, BOUNDARY)}
        )
    spec = PipelineSpec(
        components=tuple(name for name in NETS if program.has_experts == (name != "dit") or name.startswith("enc")),
        units=[getattr(module, unit.name) for unit in program.units],
        model_fn=module.predict,
        decoders=(),
        inputs=module.INPUTS,
        schedule=SCHEDULE,
        latent_shape=latent_shape,
        apply_guidance=lambda positive, negative, scale: positive,
        constrain_latents=module.hold if program.hold else None,
        experts=experts,
        cfg_inputs=program.cfg_inputs,
        padded=program.padded,
        family="second",
        variant="base",
    )  # fmt: skip
    task = SFT
    if program.loss is not None:
        task = Task.of("second", module.loss, program.branches, module.TASK_INPUTS)
    config = TrainConfig(
        model="second",
        dataset_base_path=media,
        dataset_metadata_path=folder / "metadata.json",
        dataset_repeat=settings["repeat"],
        batch_size=settings["batch_size"],
        gradient_accumulation_steps=settings["accumulation"],
        num_epochs=settings["epochs"],
        num_frames=settings["num_frames"],
        frame_sampling=settings["frame_sampling"],
        frame_samples=2 if settings["frame_sampling"] == "uniform" else None,
        extra_inputs="extra" if settings["asks_extra"] else None,
        timestep_sampling=settings["timestep_sampling"],
        loss_weighting=settings["loss_weighting"],
        mixed_precision=program.dtype,
        seed=settings["seed"],
        feature_cache=folder / "cache",
        output_path=folder / "out",
    )
    full: list[str] = []
    lora: list[LoraConfig] = []
    for name, how in program.trained.items():
        if how == "lora":
            lora.append(LoraConfig(name, ("first",), LORA_RANK, LORA_ALPHA))
        else:
            full.append(f"{name}.first" if how == "part" else name)
    models = tuple(
        ModelConfig(path=str(network_file(media, name, flavour)))
        for name, flavour in program.flavours.items()
        if name in spec.components
    )
    return Setup(
        config,
        RECORD,
        spec.with_task_inputs(task),
        task,
        "",
        Trainables(tuple(full), tuple(lora)),
        torch.device("cpu"),
        models,
        load_extensions(),
    )


def latent_shape() -> tuple[int, int]:
    return (1, 4)


@dataclass
class Run:
    """What a run computed, and how it ended."""

    error: DstrainError | None = None
    micro_batches: list[list[list[SampleKey]]] = field(default_factory=list)
    """The keys of each micro-batch of each step."""
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    """The trained parameters before each step."""
    losses: list[list[Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    masks: dict[str, list[Tensor]] = field(default_factory=dict)
    """What dropout drew, by network."""
    end: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers after the last step."""
    values: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """What stage 2 read for each sample."""


def train(setup: Setup, run: Run) -> None:
    """Train as a run does, but with an update that does not amplify rounding."""
    samples = open_training_data(setup)
    processes = ProcessGroup(Accelerator(cpu=True))
    made = prepare(setup, processes, samples, TrainingModule)
    parameters = made.module.trained.parameters
    for name, parameter in parameters.items():
        # Zero at first, and then the gradients of lora_A are zero too.
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.3)
    networks = {
        name: one
        for name, one in made.module.pipeline.components.items()
        if isinstance(one, Network)
    }
    for name, network in networks.items():
        run.masks[name] = network.drop.drawn = []
    if setup.stage:
        for key in map(tuple, samples.sample_ids.tolist()):
            run.values[key] = samples.source.sample(*key).values
    for epoch in range(setup.config.num_epochs or 1):
        for keys in made.order.global_batches(epoch):
            run.parameters.append(
                {name: one.detach().clone() for name, one in parameters.items()}
            )
            run.micro_batches.append([])
            run.losses.append([])
            for micro in split_across_ranks(keys, setup.config.batch_size, 0, 1):
                loaded = [
                    samples.source.sample(key.row, key.chunk) for key in micro.keys
                ]
                run.micro_batches[-1].append(list(micro.keys))
                try:
                    loss = made.module(Batch(micro, loaded))
                except UsageError as error:
                    if not error.rows:
                        raise
                    raise error.at(
                        made.data.name_row(row) for row in error.rows
                    ) from error
                if loss.requires_grad:
                    loss.backward()
                run.losses[-1].append(loss.detach())
            run.gradients.append(
                {
                    name: None if p.grad is None else p.grad.clone()
                    for name, p in parameters.items()
                }
            )
            update(parameters.values())
    for name, network in networks.items():
        run.end |= {
            f"{name}.{key}": value.clone()
            for key, value in network.state_dict().items()
        }


@torch.no_grad()
def update(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= LEARNING_RATE * parameter.grad / (1 + parameter.grad.norm())
            parameter.grad = None


def attempt(way: Callable[[Setup, Run], None], setup: Setup) -> Run:
    """Run a program in one of both ways; anything but an error in words is a failure."""
    run = Run()
    try:
        way(setup, run)
    except DstrainError as error:
        run.error = error
    return run


def split(setup: Setup, run: Run) -> None:
    data_process(
        replace(setup, stage="data_process"), ProcessGroup(Accelerator(cpu=True))
    )
    LOADED.append("|")
    train(replace(setup, stage="train"), run)


def check(seed: int, media: Path, folder: Path) -> str:
    """Compare a program's ways; return how it ended."""
    program = draw_program(seed)
    if seed % 5 == 0:
        fill_with_older_code(program, media, folder)
    with imported(program, folder / "code", program.source) as module:
        return compare(program, module, media, folder)


def fill_with_older_code(program: Program, media: Path, folder: Path) -> None:
    """Fill the feature cache by functions of the same names that compute something else."""
    source = program.source.replace("(h * 1)", "(h * 7)").replace(
        "FACTOR = ", "FACTOR = 1"
    )
    with imported(program, folder / "older", source) as module, suppress(DstrainError):
        setup = set_up(program, module, media, folder)
        data_process(
            replace(setup, stage="data_process"), ProcessGroup(Accelerator(cpu=True))
        )


def compare(program: Program, module: ModuleType, media: Path, folder: Path) -> str:
    setup = set_up(program, module, media, folder)
    unsplit = attempt(train, setup)
    LOADED.clear()
    in_stages = attempt(split, setup)
    loaded = list(LOADED)
    evaluator = Evaluator(program, module, media)
    if unsplit.error or in_stages.error:
        check_refusal(evaluator, unsplit, in_stages)
        return "refused"
    assert_equal(unsplit, in_stages)
    evaluator.load(unsplit.parameters[0])
    cut = loaded.index("|")
    if program.seed % 5:
        found = set(loaded[:cut])
        assert found == evaluator.loaded("data_process"), f"stage 1 loads {found}"
    found = set(loaded[cut + 1 :])
    assert found == evaluator.loaded("train"), f"stage 2 loads {found}"
    check_cached(evaluator, in_stages)
    check_losses(evaluator, unsplit)
    return "trained"


def check_refusal(evaluator: Evaluator, *runs: Run) -> None:
    """Both ways refuse the program, with errors of one kind that name what is at fault."""
    texts = [str(run.error) for run in runs]
    assert all(run.error for run in runs), f"only one way refuses: {texts}"
    assert len({type(run.error) for run in runs}) == 1, f"errors of two kinds: {texts}"
    reasons = [
        *refusals(evaluator),
        *(one for run in runs for one in refusals(evaluator, run)),
    ]
    for text in texts:
        named = [one for one in reasons if all(name in text for name in one.names)]
        assert named or evaluator.odd, f"refused for no reason: {text}; {reasons}"


def refusals(evaluator: Evaluator, run: Run | None = None) -> Iterator[Refused]:
    """Yield why a sample may be refused: for what is frozen, or what a run met first."""
    if run is not None and run.parameters:
        evaluator.load(run.parameters[0])
        evaluator.replay(run.masks)
        try:
            for parameters, micros in zip(
                run.parameters, run.micro_batches, strict=True
            ):
                evaluator.set_parameters(parameters)
                for keys in micros:
                    evaluator.losses(keys)
        except Refused as error:
            yield error
        except EndOfNotes:  # the run was refused before this, for an odd value
            return
    if run is None:
        evaluator.load_frozen()
        for row, chunk in evaluator.samples:
            try:
                evaluator.values(SampleKey(0, 0, 0, row, chunk), "frozen")
            except Refused as error:
                yield error


def assert_equal(a: Run, b: Run) -> None:
    assert a.micro_batches == b.micro_batches
    assert same(a.parameters, b.parameters), "other weights"
    assert same(a.losses, b.losses), f"losses differ: {a.losses} {b.losses}"
    for i, (one, other) in enumerate(zip(a.gradients, b.gradients, strict=True)):
        assert same(one, other), f"gradients of step {i} differ"
    shared = a.end.keys() & b.end.keys()
    assert same(
        {key: a.end[key] for key in sorted(shared)},
        {key: b.end[key] for key in sorted(shared)},
    )
    assert {k: len(v) for k, v in b.masks.items()}.items() <= {
        k: len(v) for k, v in a.masks.items()
    }.items()


def check_cached(evaluator: Evaluator, run: Run) -> None:
    """The cache has exactly what training reads and does not compute, and it is right."""
    rows = evaluator.program.rows
    assert list(run.values) == evaluator.samples, "other samples"
    with torch.no_grad():
        for (row, chunk), values in run.values.items():
            names = evaluator.cached_names(present(evaluator.program, rows[row]))
            assert set(values) == names, (
                f"row {row}: cached {sorted(values)}, needed {sorted(names)}"
            )
            expected = evaluator.values(SampleKey(0, 0, 0, row, chunk), "frozen")
            for name, value in values.items():
                assert same(value, expected[name]), (
                    f"row {row}: cached {name} is {value}, not {expected[name]}"
                )


def check_losses(evaluator: Evaluator, run: Run) -> None:
    """The losses, gradients and buffers are those of plain calls."""
    program = evaluator.program
    settings = program.settings
    coarse = program.dtype == "bf16"
    evaluator.replay(run.masks)
    drawn = [key for step in run.micro_batches for micro in step for key in micro]
    assert sorted(drawn) == sorted(
        SampleKey(settings["seed"], epoch, repeat, *sample)
        for epoch in range(settings["epochs"])
        for repeat in range(settings["repeat"])
        for sample in evaluator.samples
    ), "other draws"
    steps = zip(
        run.micro_batches, run.losses, run.parameters, run.gradients, strict=True
    )
    for micros, losses, parameters, gradients in steps:
        # From the run's own weights: what a step's rounding changes does not grow.
        evaluator.set_parameters(parameters)
        count = sum(map(len, micros))
        for keys, loss in zip(micros, losses, strict=True):
            own = evaluator.losses(keys).sum() / count
            if own.requires_grad:
                own.backward()
            close(loss, own.detach(), 3e-2 if coarse else 1e-5, f"loss of {keys}")
        for name, gradient in gradients.items():
            parameter = evaluator.trained[plain_name(name)]
            assert (gradient is None) == (parameter.grad is None), (
                f"gradient of {name}: {gradient}"
            )
            if gradient is not None:
                close(
                    gradient,
                    parameter.grad,
                    0.1 if coarse else 1e-4,
                    f"gradient of {name}",
                )
                parameter.grad = None
    for name, network in evaluator.networks.items():
        if "norm.running_mean" in network.state_dict():
            for key in (
                "norm.running_mean",
                "norm.running_var",
                "norm.num_batches_tracked",
            ):
                found = run.end.get(f"{name}.{key}")
                if found is not None:
                    close(
                        found.float(),
                        network.state_dict()[key].float(),
                        3e-2 if coarse else 1e-4,
                        f"buffer {key} of {name}",
                    )


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    difference = (found - wanted).norm()
    assert difference <= tolerance * wanted.norm() + tolerance * 1e-2, (
        f"{what}: {found}, not {wanted}"
    )


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    write_media(folder)
    return folder


@pytest.mark.promise("R10", "the split is right: random programs, unsplit == split")
@pytest.mark.parametrize("seed", PROGRAMS)
def test_a_program_computes_what_plain_calls_do_or_is_refused_alike(
    seed: int, media: Path, tmp_path: Path
) -> None:
    check(seed, media, tmp_path)


def test_programs_cover_what_a_split_may_get_wrong() -> None:
    """Each thing that could go wrong is in several of the ordinary suite's 200 programs."""
    counts: Counter[str] = Counter()
    for seed in PROGRAMS[::10]:
        counts.update(features(draw_program(seed)))
    wanted = {*KINDS, *WAYS, *FLAVOURS, *FEATURES}
    rare = {
        name: counts[name]
        for name in wanted
        if counts[name] < (1 if name in ODD else 5)
    }
    assert not rare, f"{rare} of {counts}"


WAYS = ("full", "part", "lora")
FEATURES = (
    "experts", "several presences", "both branches", "bf16 run", "clips", "live dropout", "live batch norm", "rng",
    "writes into what it reads", "writes into its own", "a value that it reads", "refuses", "loss of its own",
    "constrained", "column of the task", "inference only", "accumulation", "batch of several",
)  # fmt: skip


def features(program: Program) -> set[str]:
    settings = program.settings
    source = program.source
    live = {
        program.flavours[name]
        for name in program.trained
        if name not in program.denoisers
    }
    there = {
        "experts": program.has_experts,
        "several presences": len({present(program, row) for row in program.rows}) > 1,
        "both branches": len(program.branches) > 1,
        "bf16 run": program.dtype == "bf16",
        "clips": "clip" in program.inputs and settings["frame_sampling"] != "head",
        "live dropout": live & {"dropout", "both"},
        "live batch norm": live & {"norm", "both"},
        "rng": 'rng.normal("jitter"' in source,
        "writes into what it reads": "    if True" in source
        or "    if not isinstance" in source,
        "writes into its own": "shared_" in source,
        "a value that it reads": "    alias_" in source,
        "refuses": "raise InputError" in source,
        "loss of its own": program.loss is not None,
        "constrained": program.hold is not None,
        "column of the task": program.listed,
        "inference only": "hint" in program.inputs,
        "accumulation": settings["accumulation"] > 1,
        "batch of several": settings["batch_size"] > 1,
    }
    kinds = {kind for unit in program.units for kind in unit.makes.values()}
    used = {program.flavours[name] for name in program.trained}
    found = {name for name, is_there in there.items() if is_there}
    return found | kinds | used | set(program.trained.values())
