"""A pipeline spec whose names do not fit is refused when it is built, naming the places that
disagree.
"""

from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from dstrain import Frames, Task, UsageError
from dstrain.graph import Input
from dstrain.plugin import (
    Column,
    EntryCount,
    ExpertSchedule,
    FlowMatchSchedule,
    Measured,
    PipelineSpec,
    Unit,
)
from PIL import Image
from torch import Tensor


class Prompt(TypedDict):
    prompt_emb: Tensor


class Joined(TypedDict):
    joined: Tensor


class Latents(TypedDict):
    input_latents: Tensor


class Overwritten(TypedDict):
    input_image: Tensor


def encode_prompt(prompt: str, *, text_encoder: Any) -> Prompt: ...
def encode_again(prompt: str, *, text_encoder: Any) -> Prompt: ...
def encode_image(input_image: Any, *, vae: Any) -> Latents: ...
def join(prompt_emb: Tensor, input_latents: Tensor | None = None) -> Joined: ...
def misspells(promt: str) -> Joined: ...
def borrows_unknown(prompt: str, *, text_encoders: Any) -> Joined: ...
def overwrites(prompt: str) -> Overwritten: ...
def ambient(
    prompt: str, *, device: Any, dtype: Any, rng: Any, branch: str, dit_config: Any
) -> Joined: ...
def predict(
    noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, *, dit: Any
) -> Tensor: ...
def predict_more(
    noisy_latents: Tensor, timestep: Tensor, prompt_embs: Tensor, *, dit: Any
) -> Tensor: ...
def shape() -> tuple[int, ...]: ...
def constrain_latents(
    latents: Tensor, timestep: Tensor, noise: Tensor, first_latents: Tensor
) -> Any: ...
def loss(predict: Any, prompt_emb: Tensor) -> Tensor: ...
def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor: ...


INPUTS: dict[str, Input] = {
    "prompt": Column("prompt"),
    "negative_prompt": Column("negative_prompt"),
    "input_image": Column("image", "image"),
}


def build(*functions: Callable[..., Any], **changes: Any) -> PipelineSpec:
    """A toy variant of these units; `changes` replace fields of the pipeline spec."""
    fields: dict[str, Any] = {
        "family": "toy",
        "variant": "base",
        "components": ("dit", "text_encoder", "vae"),
        "units": functions,
        "model_fn": predict,
        "decoders": (),
        "inputs": INPUTS,
        "schedule": FlowMatchSchedule(shift=3.0),
        "latent_shape": shape,
        "apply_guidance": apply_guidance,
    }
    return PipelineSpec(**(fields | changes))


def refusal(*functions: Callable[..., Any], **changes: Any) -> str:
    """The message with which a pipeline spec is refused."""
    with pytest.raises(UsageError) as caught:
        build(*functions, **changes)
    return str(caught.value)


def test_a_wiring_whose_names_fit_is_built() -> None:
    assert set(build(encode_prompt, encode_image, join).makers) == {
        "prompt_emb",
        "input_latents",
        "joined",
    }


def test_a_second_maker_is_refused_naming_both_units_and_the_value() -> None:
    text = refusal(encode_prompt, encode_again)
    assert all(word in text for word in ("encode_prompt", "encode_again", "prompt_emb"))


def test_a_name_is_an_input_or_made_never_both() -> None:
    text = refusal(encode_prompt, overwrites)
    assert "overwrites" in text
    assert "input_image" in text


def test_a_read_before_its_maker_is_refused_even_if_optional() -> None:
    text = refusal(encode_prompt, join, encode_image)
    assert "join" in text
    assert "input_latents" in text
    assert "an output of an earlier unit" in text


def test_reading_an_unknown_name_is_refused_with_the_nearest() -> None:
    text = refusal(encode_prompt, misspells)
    assert "misspells" in text
    assert "did you mean 'prompt'" in text


def test_asking_for_an_unknown_component_is_refused_with_the_nearest() -> None:
    text = refusal(encode_prompt, borrows_unknown)
    assert "borrows_unknown" in text
    assert "did you mean 'text_encoder'" in text


def test_context_and_configurations_may_be_injected() -> None:
    assert build(encode_prompt, ambient)


def test_model_fn_and_hold_read_only_what_is_known() -> None:
    assert "prompt_embs" in refusal(encode_prompt, model_fn=predict_more)
    assert "first_latents" in refusal(
        encode_prompt,
        constrain_latents=constrain_latents,
    )


def test_per_branch_names_inputs() -> None:
    assert "unprompt" in refusal(encode_prompt, cfg_inputs={"prompt": "unprompt"})


def test_padded_names_known_values() -> None:
    assert "prompt_embs" in refusal(encode_prompt, padded={"prompt_embs": 1})


def test_the_denoiser_of_experts_may_be_injected_though_no_component_has_that_name() -> (
    None
):
    experts = ExpertSchedule("dit", {"high": (875, 1000), "low": (0, 875)})
    assert build(
        encode_prompt,
        components=("high", "low", "text_encoder", "vae"),
        experts=experts,
    )


def test_what_is_made_from_a_per_branch_value_is_per_branch() -> None:
    spec = build(
        encode_prompt, encode_image, join, cfg_inputs={"prompt": "negative_prompt"}
    )
    assert spec.branched == {"prompt", "prompt_emb", "joined"}


def test_two_units_of_one_name_are_refused() -> None:
    def encode_image(prompt: str) -> Joined: ...

    assert "encode_image" in refusal(
        encode_prompt, globals()["encode_image"], encode_image
    )


def test_a_size_is_measured_on_a_known_input() -> None:
    assert "video" in refusal(
        encode_prompt, inputs={**INPUTS, "height": Measured("video", "height")}
    )


def test_masks_come_after_the_image_that_they_are_of() -> None:
    mask = Column("mask", "image", of="picture")
    picture = Column("picture", "image")
    for inputs in (
        {"mask": mask},
        {"mask": mask, "picture": picture},
        {"picture": Column("picture"), "mask": mask},
    ):
        assert "'picture' is not an image or a video before it" in refusal(
            encode_prompt, inputs={**INPUTS, **inputs}
        )


def test_a_list_has_as_many_entries_as_a_known_input_says() -> None:
    frames = Column("frames", "images", entries=EntryCount("prompts"))
    assert "'prompts' is not an input" in refusal(
        encode_prompt, inputs={**INPUTS, "frames": frames}
    )


def test_the_parts_of_an_expert_are_components() -> None:
    assert "low" in refusal(
        encode_prompt,
        experts=ExpertSchedule("dit", {"dit": (875, 1000), "low": (0, 875)}),
    )


def test_what_acts_beside_each_expert_is_asked_for_by_one_name() -> None:
    experts = ExpertSchedule(
        "dit",
        {"high": (875, 1000), "low": (0, 875)},
        {"adapter": {"high": "adapter_1", "low": "adapter_2"}},
    )
    assert experts.roles == {
        "dit": ("high", "low"),
        "adapter": ("adapter_1", "adapter_2"),
    }
    assert experts.component("adapter", "low") == "adapter_2"
    assert experts.component("dit", "low") == "low"
    assert experts.expert_of("adapter_2") == experts.expert_of("low") == "low"
    assert experts.expert_of("vae") == ""
    experts = ExpertSchedule("dit", {"dit": (0, 1000)}, {"adapter": {"dit": "beside"}})
    assert "'beside' is not a component" in refusal(encode_prompt, experts=experts)


def test_a_plain_function_without_a_typed_dict_is_refused_as_a_unit() -> None:
    text = refusal(shape)
    assert "test_spec.shape: returns tuple[int, ...]" in text
    assert "TypedDict" in text


def test_a_unit_of_another_version_is_taken_as_it_is() -> None:
    assert build(units=[Unit(encode_prompt, version=2)]).units[0].version == 2


def test_functions_become_specs_without_what_their_caller_gives() -> None:
    def hold(latents: Any, timestep: Any, noise: Any, input_image: Any) -> Any: ...
    def decode(latents: Tensor, prompt: str, *, vae: Any, rng: Any) -> Joined: ...

    spec = build(encode_prompt, constrain_latents=hold, decoders=[decode])
    assert dict(spec.model_fn.inputs) == {"prompt_emb": True}
    assert spec.constrain_latents is not None
    assert dict(spec.constrain_latents.inputs) == {"input_image": True}
    assert dict(spec.decoders[0].inputs) == {"prompt": True}


def test_a_function_that_lacks_what_it_is_given_is_refused() -> None:
    def backwards(timestep: Any, noisy_latents: Any, prompt_emb: Any) -> Any: ...
    def decode(prompt: str) -> Joined: ...

    for changes, given in (
        ({"model_fn": backwards}, "noisy_latents, timestep"),
        ({"decoders": (decode,)}, "latents"),
        ({"constrain_latents": shape}, "latents, timestep, noise"),
    ):
        text = refusal(encode_prompt, **changes)
        assert f"its first parameters must be {given}: " in text


def test_defaults_name_inputs_or_arguments_of_sampling() -> None:
    assert build(encode_prompt, defaults={"prompt": "", "guidance_scale": 2.0})
    text = refusal(encode_prompt, defaults={"guidance": 2.0})
    assert "defaults: 'guidance' is not an input or one of" in text


def test_unused_parameters_name_components() -> None:
    text = refusal(encode_prompt, unused_parameters={"text_encode": ("head.*",)})
    assert "unused_parameters: 'text_encode' is not a component; did you mean" in text


@pytest.mark.parametrize(
    ("kind", "layers", "video"),
    [
        (Image.Image, False, False),
        (list[Image.Image], True, False),
        (Frames, False, True),
    ],
)
def test_what_the_last_decoder_returns_is_what_inference_makes(
    kind: Any, layers: bool, video: bool
) -> None:
    def decode(latents: Tensor) -> Any: ...

    decode.__annotations__["return"] = TypedDict("Made", {"made": kind})
    spec = build(encode_prompt, decoders=[decode])
    assert (spec.makes_layers, spec.makes_video) == (layers, video)


def test_only_units_and_decoders_draw_random_numbers() -> None:
    def drawn_shape(*, rng: Any) -> tuple[int, ...]: ...

    text = refusal(encode_prompt, latent_shape=drawn_shape)
    assert "drawn_shape: 'rng' is not a component or one of device, dtype" in text


def test_a_spec_without_names_is_named_by_its_model_fn() -> None:
    text = refusal(encode_prompt, padded={"prompt_embs": 1}, family="")
    assert "pipeline spec with tests.unit.graph.test_spec.predict: padded" in text


def test_the_inputs_of_a_task_join_the_variants_table() -> None:
    seed = Column("seed", "integer")
    task = Task.of("distill", loss, inputs={"seed": seed})
    joined = build(encode_prompt).with_task_inputs(task)
    assert joined.inputs == {**INPUTS, "seed": seed}
    assert joined.with_task_inputs(task) == joined


def test_an_input_that_task_and_variant_declare_differently_is_refused() -> None:
    task = Task.of("distill", loss, inputs={"prompt": Column("prompt", "number")})
    message = "task distill: its input 'prompt' is also one of toy base; rename one"
    with pytest.raises(UsageError, match=message):
        build(encode_prompt).with_task_inputs(task)


def test_a_variant_has_no_input_that_nothing_uses() -> None:
    spec = build(encode_prompt, cfg_inputs={"prompt": "negative_prompt"})
    with pytest.raises(UsageError) as caught:
        spec.named("toy", "base")
    assert "toy base: input 'input_image' is used by no function" in str(caught.value)
    whole = build(encode_prompt, encode_image, cfg_inputs=spec.cfg_inputs)
    assert whole.named("toy", "base").where == "toy base"


def test_what_is_given_is_frozen() -> None:
    inputs = dict(INPUTS)
    spec = build(encode_prompt, inputs=inputs, components=["dit", "text_encoder"])
    inputs.clear()
    assert set(spec.inputs) == set(INPUTS)
    assert spec.components == ("dit", "text_encoder")
    with pytest.raises(TypeError):
        spec.inputs["more"] = Column("more")  # type: ignore[index]  # what is tested
