"""Run `dstrain generate`: one image or video, or one for each row of a table."""

from dstrain.config.schema import GenerateConfig
from dstrain.config.validation import validate
from dstrain.generation.batch import generate_dataset
from dstrain.generation.single import generate_one
from dstrain.training.memory import GENERATE_ADVICE, oom_as_error


def generate(config: GenerateConfig) -> None:
    """Make the picture, video or data set a configuration describes; raises a
    DstrainError for what does not fit.
    """
    validate(config)
    with oom_as_error("generate", *GENERATE_ADVICE):
        if config.dataset is None:
            generate_one(config)
            return
        generate_dataset(config, config.dataset)
