"""Generate one image or video."""

from dstrain.config.schema import GenerateConfig
from dstrain.console import Progress, redacted
from dstrain.data.output import check_output, write
from dstrain.generation.inputs import inputs_given, names_given
from dstrain.generation.source import check_used, chosen, sampling_given
from dstrain.pipeline.sampling import planned
from dstrain.storage.files import probe


def generate_one(config: GenerateConfig) -> None:
    """Make one picture or video, and write it."""
    with chosen(config, names_given(config)) as source:
        check_output(config.output, source.spec)
        arguments = {**inputs_given(config, source.spec), **sampling_given(config)}
        call = planned(source.spec, arguments)
        check_used(config, source.spec, call.plan.used_inputs)
        probe(config.output.parent)
        pipeline = source.load()
        with Progress(
            "generate", call.sampling.num_inference_steps, brief=True
        ) as progress:
            made = pipeline(
                **arguments, on_step=lambda number, latents: progress.step()
            )
        write(made, config.output)
        print(redacted(f"wrote {config.output}"))
