"""The short form of published command lines: --model_id in place of the long option."""

from dstrain import ModelConfig, TrainConfig
from dstrain.models.naming import model_configs
from dstrain.plugin import ModelFamily


def long_form(family: ModelFamily, origins: str) -> list[ModelConfig]:
    """Return the model files of --model_id_with_origin_paths, parts separated by spaces."""
    joined = ",".join(origins.split())
    config = TrainConfig(model=family.name, model_id_with_origin_paths=joined)
    return list(model_configs(config, family))


def short_form(family: ModelFamily, model_id: str) -> list[ModelConfig]:
    """Return the model files of --model_id."""
    return list(
        model_configs(TrainConfig(model=family.name, model_id=model_id), family)
    )
