"""Conversions of the text encoders: whether they are trained, how fast, and what they read."""

from typing import Any

from dstrain_tools.importing.context import Context, as_whole_number, truth
from dstrain_tools.importing.entries import Result

CLIP_TOKENS = 75
"""Tokens of a prompt that CLIP takes, without those of its beginning and end."""


def rates(context: Context) -> str:
    """Return the learning rate of the denoiser, and those of the trained text encoders."""
    found = [str(context.denoiser_rate)]
    for name in context.trained_encoders:
        own = context.encoder_rate(name)
        if str(own) != found[0]:
            found.append(f"{name}={own}")
    return ",".join(found)


def encoder_rate(option: str, value: Any, context: Context) -> Result:
    """Give the learning rate of text encoders that are trained."""
    if context.trained_encoders:
        return Result({option: rates(context)})
    if not value or context.is_on("network_train_unet_only"):
        return Result(note="text encoders are not trained")
    if context.table.trains_encoders:
        return Result(note="text encoders are not trained")
    advice = "name them in --lora_base_model, and give each a rate in --learning_rate"
    return Result(lost=f"to train text encoders, {advice}")


def trained(option: str, value: Any, context: Context) -> Result:
    """Name the components that LoRA is added to, where text encoders are among them."""
    encoders = context.trained_encoders
    if not context.trains_lora or not encoders:
        return Result(note="text encoders are not trained")
    names = [context.model.family.default_trainable, *encoders]
    if context.is_on("network_train_text_encoder_only"):
        names = [*encoders]
    return Result({option: ",".join(names)})


def train_encoders(option: str, value: Any, context: Context) -> Result:
    """Train the text encoders, too: with LoRA, or in full."""
    if not truth(value):
        return Result(note="is off")
    if context.trains_lora:
        return trained(option, value, context)
    return Result(note="trainable_models has them")


def prompt_tokens(option: str, value: Any, context: Context) -> Result:
    """Leave the length of prompts to the model."""
    if not value or as_whole_number(value) <= CLIP_TOKENS:
        return Result(note="is what CLIP takes")
    return Result(lost=f"prompts have the {CLIP_TOKENS} tokens that CLIP takes")
