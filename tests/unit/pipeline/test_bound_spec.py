"""A bound spec names what is not loaded, and what its model_fn may not return."""

from dataclasses import replace
from typing import Any

import pytest
from dstrain import Pipeline, UsageError
from torch import Tensor

pytestmark = pytest.mark.usefixtures("tiny")


def test_a_component_that_is_not_loaded_is_named(pipe: Pipeline) -> None:
    del pipe.components["vae"]
    with pytest.raises(UsageError, match=r"vae is not loaded; .*text_encoder"):
        pipe(prompt="dog", num_inference_steps=1)


def test_a_prediction_of_another_shape_is_refused(pipe: Pipeline) -> None:
    def predict_less(noisy_latents: Tensor, timestep: Tensor, *, dit: Any) -> Tensor:
        return noisy_latents[..., :1]

    pipe.spec = replace(pipe.spec, model_fn=predict_less)
    with pytest.raises(UsageError, match=r"shape \[1, 4, 2, 1\]; .*\[1, 4, 2, 2\]"):
        pipe(prompt="dog", num_inference_steps=1)
