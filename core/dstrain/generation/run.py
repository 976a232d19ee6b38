"""Run `dstrain generate`."""

from functools import partial

from dstrain.config.options.generate import GenerateConfig
from dstrain.config.serialize import with_run_options
from dstrain.config.validation import validate
from dstrain.console import progress_bar, redacted
from dstrain.data.output import check_output, output_paths, save_image_or_video
from dstrain.generation.batch import generate_dataset
from dstrain.generation.inputs import parse_arguments
from dstrain.generation.prompts import notice
from dstrain.generation.source import check_used, open_source
from dstrain.graph.long_prompts import noticing_long_prompts
from dstrain.pipeline.sampling import plan_inference
from dstrain.storage.files import check_writable
from dstrain.training.memory import GENERATE_ADVICE, oom_as_error


def generate(config: GenerateConfig) -> None:
    """Generate the image, video or dataset that a configuration describes; raises
    DstrainError.
    """
    config = with_run_options(config)
    validate(config)
    start(config)


def start(config: GenerateConfig) -> None:
    """Generate from a configuration that is valid; see `generate`."""
    with oom_as_error("generate", *GENERATE_ADVICE):
        if config.dataset is None:
            generate_one(config)
        else:
            generate_dataset(config, config.dataset)


def generate_one(config: GenerateConfig) -> None:
    """Generate one image or video, and write it."""
    with open_source(config) as source:
        check_output(config.output, source.spec)
        arguments = parse_arguments(config, source.spec)
        call = plan_inference(source.spec, arguments)
        check_used(config, source.spec, call.plan.used_inputs)
        check_writable(config.output.parent)
        pipeline = source.load()
        steps = call.sampling.num_inference_steps
        with progress_bar("generate", steps, brief=True) as progress:
            arguments["on_step"] = lambda number, latents: progress.update()
            with noticing_long_prompts(
                partial(notice, config.on_long_prompt, "--prompt")
            ):
                output = pipeline(**arguments)
        save_image_or_video(output, config.output)
        for path in output_paths(output, config.output):
            print(redacted(f"wrote {path}"))
