"""Write the command that tries what a run has trained."""

import textwrap

from dstrain.console import redacted, shell_command
from dstrain.data import Dataset
from dstrain.runs.training_run import TrainingRun

LONGEST_PROMPT = 100
"""Letters of a prompt in a command that is to be read, too."""
MOST_ROWS = 1000
"""Most rows that are searched for a caption."""
STEPS = "num_inference_steps"
UNKNOWN = "..."


def trial_command(run: TrainingRun) -> str:
    """Return the command that makes an image or a video with the weights of a run: of
    a prompt of the run, or of the first caption.
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
