"""Conversions of the text encoders: whether they are trained, how fast, and what they read."""

from typing import Any

from dstrain_tools.importing.context import Context, as_whole_number, truth
from dstrain_tools.importing.entries import Result

ONE_COMPONENT = (
    "a run adds LoRA to one component: train that of a text encoder in a run of its own, "
    "with --lora_base_model NAME"
)
CLIP_TOKENS = 75
"""Tokens of a prompt that CLIP takes, without those of its beginning and end."""


def with_encoders(value: Any, context: Context) -> str:
    """Return a learning rate, with those of text encoders that have their own."""
    found = [str(value)]
    for number, name in enumerate(context.model.encoders, 1):
        own = context.value(f"learning_rate_te{number}")
        if name in context.trained_encoders and own is not None:
            found.append(f"{name}={own}")
    return ",".join(found)


def encoder_rate(option: str, value: Any, context: Context) -> Result:
    """Leave out the learning rate of text encoders that are not trained."""
    if not value or context.is_on("network_train_unet_only"):
        return Result(note="text encoders are not trained")
    return Result(lost=ONE_COMPONENT)


def rate_of_one(option: str, value: Any, context: Context) -> Result:
    """Leave the learning rate of one text encoder to that of the denoiser."""
    if not context.trained_encoders:
        return Result(note="text encoders are not trained")
    return Result(note="follows learning_rate")


def train_encoders(option: str, value: Any, context: Context) -> Result:
    """Train the text encoders, too, in full."""
    if not truth(value):
        return Result(note="is off")
    if context.trains_lora:
        return Result(lost=ONE_COMPONENT)
    return Result(note="trainable_models has them")


def denoiser_alone(option: str, value: Any, context: Context) -> Result:
    """Add LoRA to the denoiser, where sd-scripts would add it to text encoders, too."""
    if truth(value) or not context.trains_lora:
        return Result(note="a LoRA is trained in the denoiser")
    if context.is_on("network_train_text_encoder_only"):
        return Result(note="network_train_text_encoder_only says it")
    return Result(lost=ONE_COMPONENT)


def encoders_alone(option: str, value: Any, context: Context) -> Result:
    """Add LoRA to the first text encoder, where the tool adds it to none but these."""
    if not truth(value) or not context.model.encoders:
        return Result(note="is off")
    return Result({option: context.model.encoders[0]}, lost=ONE_COMPONENT)


def prompt_tokens(option: str, value: Any, context: Context) -> Result:
    """Leave the length of prompts to the model."""
    if not value or as_whole_number(value) <= CLIP_TOKENS:
        return Result(note="is what CLIP takes")
    return Result(lost=f"prompts have the {CLIP_TOKENS} tokens that CLIP takes")
