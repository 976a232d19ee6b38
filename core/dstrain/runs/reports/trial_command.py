"""Write the command that tries what a run has trained."""

import textwrap

from dstrain.console import redacted, shell_command
from dstrain.data import Dataset
from dstrain.graph import Column, PipelineSpec, make_plan
from dstrain.pipeline import generate_task
from dstrain.runs.datasets.flags import most_frames
from dstrain.runs.datasets.sizes import only_size
from dstrain.runs.training_run import TrainingRun

LONGEST_PROMPT = 100
"""Letters of a prompt in a command that is to be read, too."""
MOST_ROWS = 1000
"""Most rows that are searched for a caption."""
STEPS = "num_inference_steps"
UNKNOWN = "..."


def trial_command(run: TrainingRun) -> str:
    """Return the command that makes an image or a video with the weights of a run: of
    a prompt of the run, or of the first caption, at the size that was trained.
    """
    setup = run.setup
    # Before it is cut: a part of a secret would not be known as one.
    whole = " ".join(redacted(_prompt(run)).split())
    # Languages without blanks have no words to leave out.
    prompt = (
        textwrap.shorten(whole, LONGEST_PROMPT, placeholder="")
        or whole[:LONGEST_PROMPT]
    )
    words = ["dstrain", "generate", "--run", str(setup.output)]
    words += ["--prompt", prompt or UNKNOWN]
    if setup.task.runs_sampler:
        # A number of steps without guidance is what was trained.
        words += [f"--{STEPS}", str(_trained_steps(run)), "--guidance_scale", "1"]
    words += _size_flags(run)
    for name in input_files(setup.spec, setup.all_inputs()):
        words += ["--input", f"{name}=FILE"]
    for name in other_inputs(setup.spec):
        default = setup.spec.defaults.get(name, UNKNOWN)
        value = _first_value(run, name, default)
        if value != default:
            words += ["--input", f"{name}={value}"]
    output = "video.mp4" if setup.spec.makes_video else "image.png"
    return shell_command([*words, "--output", output])


def first_caption(dataset: Dataset) -> str:
    """Return the first caption of a dataset that is not blank, '' if there is none."""
    for cells in dataset.rows[:MOST_ROWS]:
        cell = cells.get("prompt")
        if cell is not None and cell.kind == "text" and cell.literal.strip():
            return str(cell.literal)
    return ""


def _prompt(run: TrainingRun) -> str:
    setup = run.setup
    if setup.prompt_rows:
        return setup.prompt_rows[0].prompt
    info = run.cache_info
    if info is None:
        return first_caption(setup.dataset)
    if info.previews:
        return str(info.previews[0]["prompt"])
    return str(info.dataset.get("caption", ""))


def _trained_steps(run: TrainingRun) -> object:
    """Return the number of the sampler's steps of the first sample."""
    if run.cache_info is None:
        cell = run.setup.dataset.rows[0].get(STEPS)
        return UNKNOWN if cell is None else cell.literal
    row, chunk = run.data.sample_ids[0]
    return run.source.sample(int(row), int(chunk)).values.get(STEPS, UNKNOWN)


def _first_value(run: TrainingRun, name: str, default: object) -> object:
    """Return an input of the first row, of several values the first one; where it is not
    known, its default, or a word in its place.
    """
    unknown = "VALUE" if default == UNKNOWN else default
    if run.cache_info is not None:
        return unknown
    cell = run.setup.dataset.rows[0].get(name)
    value = unknown if cell is None else cell.literal
    return value[0] if isinstance(value, list) else value


def _size_flags(run: TrainingRun) -> list[str]:
    """Return the flags of the size that was trained, where inference reads them and would
    take another by default: that of the run, or of the samples if they have one.
    """
    config = run.setup.config
    defaults = run.setup.spec.defaults
    frames, height, width = most_frames(config), config.height, config.width
    size = only_size(run.data.sizes)
    if size is not None:
        frames, height, width = size
    words = []
    for values in ({"height": height, "width": width}, {"num_frames": frames}):
        usual = {name: defaults.get(name) for name in values}
        if None not in (*values.values(), *usual.values()) and values != usual:
            for name, value in values.items():
                words += [f"--{name}", str(value)]
    return words


def input_files(spec: PipelineSpec, trained_with: frozenset[str]) -> list[str]:
    """Return the inputs of inference that are images or videos, of optional ones those
    with which training was done.
    """
    return [
        name
        for name, column in _columns(spec).items()
        if column.is_file and (name in trained_with or not column.optional)
    ]


def other_inputs(spec: PipelineSpec) -> list[str]:
    """Return the inputs of inference that are no files, beside the prompt: it needs a
    value of them, or has a default that the rows may not have.
    """
    return [
        name
        for name, column in _columns(spec).items()
        if not (column.is_file or column.optional)
        and name not in (*spec.cfg_inputs, "prompt")
    ]


def _columns(spec: PipelineSpec) -> dict[str, Column]:
    """Return the columns that inference reads, by input."""
    task = generate_task(spec, guided=False)
    used = make_plan(spec, frozenset(spec.inputs), task).used_inputs
    return {
        name: source
        for name, source in spec.inputs.items()
        if isinstance(source, Column) and name in used
    }
