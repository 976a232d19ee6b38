"""Every set of trainables that a family is held to follows from its spec."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.trained_sets import (
    LORA,
    TrainedSet,
    adapters,
    conditioners,
    denoisers,
    trained_sets,
)
from torch import Tensor


def test_the_denoiser_and_each_conditioner_are_trained_in_full_and_by_lora(
    fine: FamilyUnderTest,
) -> None:
    assert denoisers(fine.family, fine.spec) == ("dit",)
    assert conditioners(fine.family, fine.spec) == ("text_encoder",)
    assert [trained.name for trained in trained_sets(fine.family, fine.spec)] == [
        "dit_lora",
        "dit",
        "text_encoder",
        "text_encoder+dit_lora",
        "text_encoder_lora",
    ]


def test_another_network_that_model_fn_calls_is_trained_like_a_conditioner(
    fine: FamilyUnderTest,
) -> None:
    def predict(
        noisy_latents: Tensor,
        timestep: Tensor,
        prompt_emb: Tensor,
        *,
        dit: Any,
        vae: Any,
    ) -> Tensor:
        return noisy_latents

    spec = replace(fine.spec, model_fn=predict)
    assert adapters(fine.family, fine.spec) == ()
    assert adapters(fine.family, spec) == ("vae",)
    names = [trained.name for trained in trained_sets(fine.family, spec)]
    assert names[:4] == ["dit_lora", "dit", "vae", "vae+dit_lora"]


def test_a_set_gives_the_flags_of_a_run(tmp_path: Path) -> None:
    assert TrainedSet(("vae", "dit")).flags == {"trainable_models": "vae,dit"}
    both = TrainedSet(("text_encoder",), "dit")
    assert both.components == ("text_encoder", "dit")
    assert both.flags == {
        "trainable_models": "text_encoder",
        "lora_base_model": "dit",
        **LORA,
    }
