"""Run `dstrain generate`."""

from dstrain.config.schema import GenerateConfig
from dstrain.config.serialize import with_run_options
from dstrain.config.validation import validate
from dstrain.generation.batch import generate_dataset
from dstrain.generation.single import generate_one
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
