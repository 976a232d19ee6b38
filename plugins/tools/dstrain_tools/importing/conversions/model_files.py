"""Conversions of what names a model: ids, files, experts, how weights are quantized."""

import glob
import json
from pathlib import Path
from typing import Any

from dstrain_tools.importing.context import (
    HIGH_NOISE,
    LOW_NOISE,
    Context,
    as_number,
    truth,
)
from dstrain_tools.importing.conversions.network import adapter
from dstrain_tools.importing.entries import NoCounterpart, Result

LOKR = "a LoKr is not added to quantized weights; --blocks_to_swap N keeps some in RAM"
HIGH_NOISE_END = 800
"""The timesteps of both published experts of Wan 2.2 meet above it: at 875 and 900."""


def names_model(option: str, value: Any, context: Context) -> Result:
    """Tell the model, as `model_of` has found it."""
    model = context.model
    if not model.model_id:
        return Result(note=f"--model {model.family.name} is given")
    if Path(str(value)).is_file():
        files = json.dumps([str(value)])
        return Result({option: model.model_id, "model_paths": files})
    note = ""
    if "/" in str(value) and value != model.model_id:
        note = f"{value} is {model.model_id} here; for files of your own use --model_id FOLDER"
    return Result({option: model.model_id}, note)


def denoiser(context: Context) -> str:
    """Return the component that is trained; of two experts, the one that the timesteps,
    the switches or the name of its file tell, else that of high noise.
    """
    model = context.model
    if not model.has_experts:
        return model.family.default_trainable
    if context.value("min_timestep") or context.value("max_timestep"):
        least = as_number(context.value("min_timestep") or 0)
        return HIGH_NOISE if least >= HIGH_NOISE_END else LOW_NOISE
    only_low = context.is_on("model.model_kwargs.train_low_noise")
    only_low = only_low and not context.is_on("model.model_kwargs.train_high_noise")
    is_named_low = "low" in Path(str(context.value("dit", ""))).name.lower()
    only_low = only_low or (is_named_low and not context.value("dit_high_noise"))
    return LOW_NOISE if only_low else HIGH_NOISE


def model_file(option: str, value: Any, context: Context) -> Result:
    """Name a file of weights, if it is here: dstrain tells its component by its keys."""
    path = Path(str(value))
    if str(value) == context.model.model_id:
        return Result(note="is the model")
    if path.is_dir():
        return Result(lost=f"{path} is a folder: give it with --model_id {path}")
    is_expert = context.model.has_experts and context.key == "dit"
    expert = {}
    if is_expert and context.trains_lora:
        expert["lora_base_model"] = denoiser(context)
    if not path.is_file():
        if not context.model.model_id:
            advice = "give it with --model_paths, or --model_id ID"
            return Result(expert, lost=f"{path} is not here: {advice}")
        what = f"{path} is not here: the published file is used"
        return Result(expert, lost=f"{what}; give yours with --model_paths")
    if is_expert:
        what = "the two experts' files have the same keys"
        advice = "docs/guide/model-files.md says how to name them"
        return Result(expert, lost=f"{what}: {advice}")
    files = [str(path)]
    # Weights in parts are named by the first of them.
    if "-00001-of-" in path.name:
        beginning, _, end = path.name.partition("-00001-of-")
        # A name may have characters that a pattern gives a meaning, such as [ and ].
        pattern = f"{glob.escape(beginning)}-*-of-{glob.escape(end)}"
        files = [str(one) for one in sorted(path.parent.glob(pattern))]
    return Result({option: json.dumps([files if len(files) > 1 else files[0]])})


def high_noise_file(option: str, value: Any, context: Context) -> Result:
    """Do not name the second expert's file: a run trains one expert."""
    other = LOW_NOISE if denoiser(context) == HIGH_NOISE else HIGH_NOISE
    what = "a run trains one expert"
    advice = (
        f"make another run with --lora_base_model {other}: docs/guide/families/wan.md"
    )
    return Result(lost=f"{what}; {advice}")


def expert_range(option: str, value: Any, context: Context) -> Result:
    """Tell which expert is trained by the timesteps that are drawn, of 1000."""
    if not context.model.has_experts and as_number(value or 0) in (0, 1000):
        return Result(note="is an end of the whole schedule, which is drawn from")
    if not context.model.has_experts:
        what = "give --min_timestep_boundary and --max_timestep_boundary"
        return Result(
            lost=f"{what} as fractions of the schedule, where 0 is the noisiest"
        )
    note = "an expert draws the timesteps that it is published for"
    return Result({option: denoiser(context)}, note)


def boundary(option: str, value: Any, context: Context) -> Result:
    """Leave the boundary between experts to the model."""
    return Result(note="the boundary of the experts is the model's own")


def high_noise(option: str, value: Any, context: Context) -> Result:
    """Train the expert of high noise, where it is the only one or both are."""
    if not truth(value):
        return Result(note="is off")
    if context.is_on("model.model_kwargs.train_low_noise"):
        note = "a run trains one expert; this one that of high noise"
        return Result({option: HIGH_NOISE}, note)
    return Result({option: HIGH_NOISE})


def low_noise(option: str, value: Any, context: Context) -> Result:
    """Train the expert of low noise, where it is the only one."""
    if not truth(value):
        return Result(note="is off")
    if context.is_on("model.model_kwargs.train_high_noise"):
        advice = "run the same file again with --lora_base_model dit2 and another --output_path"
        return Result(lost=f"a run trains one expert; {advice}")
    return Result({option: LOW_NOISE})


def quantized_denoiser(option: str, value: Any, context: Context) -> Result:
    """Keep the denoiser in fp8."""
    if not truth(value):
        return Result(note="is off")
    if not context.trains_lora:
        return Result(lost="weights that are trained in full are not quantized")
    if adapter(context) == "lokr":
        return Result(lost=LOKR)
    return Result({option: denoiser(context)})


def quantized_encoder(option: str, value: Any, context: Context) -> Result:
    """Keep the large text encoder in fp8."""
    if not truth(value):
        return Result(note="is off")
    return Result({option: _large_encoder(context)})


def quantize(option: str, value: Any, context: Context) -> Result:
    """Quantize the denoiser."""
    if not truth(value):
        return Result(note="is off")
    if not context.trains_lora:
        return Result(lost="weights that are trained in full are not quantized")
    if adapter(context) == "lokr":
        return Result(lost=LOKR)
    kind = str(context.value("model.qtype", "qfloat8"))
    return _quantized(option, denoiser(context), kind)


def quantize_encoder(option: str, value: Any, context: Context) -> Result:
    """Quantize the text encoders."""
    if not truth(value):
        return Result(note="is off")
    kind = str(context.value("model.qtype_te", "qfloat8"))
    return _quantized(option, _large_encoder(context), kind)


def _large_encoder(context: Context) -> str:
    """Return the last text encoder, which is the largest of several."""
    encoders = context.model.encoders
    if not encoders:
        raise NoCounterpart(f"family {context.model.family.name} has no text encoder")
    return encoders[-1]


def _quantized(option: str, component: str, kind: str) -> Result:
    base = kind.partition("|")[0]
    if base in ("qfloat8", "float8"):
        return Result({option: f"{component}:fp8"})
    if base in ("qint8", "int8"):
        return Result(
            {option: f"{component}:int8_block"}, f"{base} by blocks of weights"
        )
    text = f"{component}:bitsandbytes_nf4"
    note = f"{base} is not offered: 4 bits of bitsandbytes are the least here"
    if "|" in kind:
        note += ", without an accuracy recovery adapter"
    return Result({option: text}, note)


def with_quantize(option: str, value: Any, context: Context) -> Result:
    """Leave the kind of quantization to the key that switches it on."""
    return Result(note="quantize and quantize_te say it with the component")
