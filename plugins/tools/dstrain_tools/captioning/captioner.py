"""A model of transformers that writes texts about images."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from dstrain import StateError, UsageError
from dstrain.models import DTYPES, default_device, opened, precision
from dstrain.plugin import GenerateConfig, Keeper, KeeperRequest, first_few
from dstrain.plugin.commands import load_extensions, silenced, without_optional
from PIL import Image
from torch import Tensor, nn

from dstrain_tools.captioning.model_files import ADVICE, ModelFiles
from dstrain_tools.captioning.options import CaptionOptions
from dstrain_tools.captioning.processor import load_processor

PROMPT = (
    "Describe this image in one paragraph: the subject, what it does and where, then "
    "composition, light, colors and style. Name only what can be seen."
)
PROMPT_OF_FRAMES = (
    "These images are frames of one video, in order. Describe the video in one paragraph: "
    "the subject and the place, how the subject and the camera move, then light, colors "
    "and style. Name only what can be seen."
)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff")
"""Settings of a model's own generation that have no meaning where nothing is drawn."""
END_OF_TURN = "<|im_end|>"
"""Ends an answer in the chat format of Qwen, which a text encoder's configuration need
not say."""
VISION = ("visual", "vision")
"""In the names of layers that read images: small ones, whose errors are seen."""
NAME = "captioner"
"""What the model is called where it is quantized."""


@dataclass(frozen=True)
class Captioner:
    """Writes texts about images."""

    model: Any
    processor: Any
    generation: Mapping[str, Any]
    """Arguments of the model's `generate`."""
    prompt: str | None
    seed: int

    @property
    def follows_instructions(self) -> bool:
        """Return whether it is asked in a chat, and may be shown several images."""
        return bool(getattr(self.processor, "chat_template", None))

    def inputs(self, shown: Sequence[Sequence[Image.Image]]) -> Mapping[str, Any]:
        """Return the model's inputs, a row for each caption.

        shown: The images, or the frames of the video, that each caption is for.
        """
        if self.follows_instructions:
            texts = [self._question(len(images)) for images in shown]
            inputs = self.processor(
                text=texts,
                images=[list(images) for images in shown],
                padding=True,
                return_tensors="pt",
            )
        else:
            # Such a model is shown one image: of a video, the frame in the middle.
            images = [images[len(images) // 2] for images in shown]
            text = self._beginning()
            given = {} if text is None else {"text": [text] * len(images)}
            inputs = self.processor(
                images=images, padding=bool(given), return_tensors="pt", **given
            )
        dtype = self.model.dtype
        device = self.model.device
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        }

    def write(
        self, shown: Sequence[Sequence[Image.Image]], names: Sequence[str]
    ) -> list[str]:
        """Return a text for each of these, as the model wrote it.

        Args:
            shown: As for `inputs`.
            names: What is shown, which the seed of tokens that are drawn depends on.
        """
        inputs = self.inputs(shown)
        key = "\0".join([str(self.seed), *names]).encode(errors="surrogateescape")
        torch.manual_seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "big"))
        with torch.inference_mode():
            tokens = self.model.generate(**inputs, **self.generation)
        asked = inputs.get("input_ids")
        if asked is not None:
            length = asked.shape[1]
            # Most models repeat the question before their answer.
            if tokens.shape[1] >= length and torch.equal(tokens[:, :length], asked):
                tokens = tokens[:, length:]
        written: list[str] = self.processor.tokenizer.batch_decode(
            tokens, skip_special_tokens=True
        )
        return written

    def _question(self, images: int) -> str:
        prompt = self.prompt or (PROMPT if images == 1 else PROMPT_OF_FRAMES)
        content = [*({"type": "image"} for _ in range(images))]
        message = {
            "role": "user",
            "content": [*content, {"type": "text", "text": prompt}],
        }
        question: str = self.processor.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        return question

    def _beginning(self) -> str | None:
        """Return the text that a model without a chat format continues, None for none."""
        mark = getattr(self.processor, "image_token", None)
        # Some have it as a token of their own processor's making.
        mark = str(getattr(mark, "content", mark) or "")
        places_it = hasattr(self.processor, "num_query_tokens")
        if not mark or places_it or (self.prompt and mark in self.prompt):
            return self.prompt
        return f"{mark}\n{self.prompt}" if self.prompt else mark


def load_captioner(files: ModelFiles, options: CaptionOptions) -> Captioner:
    """Load a model and its processor.

    Raises UsageError for a model that is no image-to-text model of transformers, and
    StateError for files that do not fit.
    """
    device = _device(options.device)
    dtype = DTYPES[precision(options.mixed_precision, device)]
    method = options.quantize
    keeper = None if method is None else _quantizing(method)
    with silenced(logging.WARNING), without_optional():
        import transformers

        transformers.logging.disable_progress_bar()
        config = _configuration(files)
        processor = load_processor(files, config)
        place = torch.device("cpu") if method else device
        model = _load_model(files, config, dtype, place)
    if keeper is not None:
        _quantize(model, keeper, device)
    model.requires_grad_(False).eval().to(device)
    processor.tokenizer.padding_side = "left"  # answers begin where questions end
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    generation = _generation(files, model, processor, options)
    return Captioner(model, processor, generation, options.prompt, options.seed or 0)


def _device(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError("--device", f"{name} cannot be used: {reason}") from error
    return device


def _configuration(files: ModelFiles) -> Any:
    """Return the configuration record; raises UsageError for a model of another kind."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as MODELS,
    )

    content = files.config()
    model_type = content["model_type"]
    config = None
    if model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type].from_dict(dict(content))
        except Exception as error:  # records raise errors of several libraries
            reason = str(error).strip().partition("\n")[0]
            what = f"is not the configuration of a {model_type} model: {reason}"
            raise StateError(files.weights / "config.json", what) from error
    if config is None or type(config) not in MODELS:
        owner = "its text encoder" if files.is_pipeline else "it"
        version = transformers.__version__
        what = f"{owner} is a {model_type!r} model, which is no image-to-text model of transformers {version}"
        raise UsageError(files.name, what, ADVICE)
    return config


def _load_model(
    files: ModelFiles, config: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as MODELS,
    )

    paths = files.weight_files()
    # As a state dict, so that nothing but these files is read.
    model, found = MODELS[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=_weights(paths),
        dtype=dtype,
        device_map={"": device},
        output_loading_info=True,
    )
    # Such as scales of weights that are stored in fewer bytes.
    layers = dict(model.named_modules())
    extra = [
        one for one in found["unexpected_keys"] if one.rpartition(".")[0] in layers
    ]
    wrong = found["missing_keys"] or found["mismatched_keys"] or extra
    if wrong:
        what = f"does not fit {type(model).__name__}: {first_few(map(str, wrong))}"
        raise StateError(files.weights, what)
    return model


def _weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return the weights in files, mapped; raises StateError for a damaged file."""
    weights: dict[str, Tensor] = {}
    for path in paths:
        with opened(path) as file:
            names = list(file.keys())
            weights |= {name: file.get_tensor(name) for name in names}
    return weights


def _quantizing(method: str) -> Keeper:
    """Return what quantizes a network by a method of `--quant_options`; raises UsageError
    for one that is not known or not installed.
    """
    try:
        options = GenerateConfig(output=Path(), quant_options=f"{NAME}:{method}")
        (keeper,) = (
            load_extensions()
            .keepers(
                KeeperRequest(
                    options,
                    components={NAME: SimpleNamespace(as_loaded=())},
                    named=lambda flag, text: [text],
                    loaded=[NAME],
                )
            )
            .all
        )
    except TypeError as error:  # no plugin has the option
        raise UsageError("--quantize", str(error)) from error
    except UsageError as error:
        error.where = "--quantize"
        raise
    return keeper


def _quantize(model: Any, keeper: Keeper, device: torch.device) -> None:
    """Quantize the linear layers of a language model, one after the other on the device."""
    last = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        reads_images = any(part in name for part in VISION)
        if isinstance(layer, nn.Linear) and layer is not last and not reads_images:
            weight = layer.weight.detach().to(device)
            keeper.place(NAME, model, f"{name}.weight", weight)
            del weight


def _generation(
    files: ModelFiles, model: Any, processor: Any, options: CaptionOptions
) -> dict[str, Any]:
    """Return the arguments of `generate`: the model's own settings, without chance unless
    it is asked for.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    if (files.weights / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(files.weights, local_files_only=True)
    own.max_length = None
    own.max_new_tokens = options.max_new_tokens
    own.do_sample = options.temperature > 0
    if own.do_sample:
        own.temperature = options.temperature
    else:
        for name in SAMPLING:
            setattr(own, name, None)
    if own.eos_token_id is None:
        text = model.config.get_text_config(decoder=True)
        own.eos_token_id = getattr(text, "eos_token_id", None)
    ends = (
        own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    )
    tokenizer = processor.tokenizer
    if END_OF_TURN in tokenizer.get_vocab():
        ends = [*ends, tokenizer.convert_tokens_to_ids(END_OF_TURN)]
    own.eos_token_id = sorted({end for end in ends if end is not None}) or None
    if own.pad_token_id is None:
        own.pad_token_id = tokenizer.pad_token_id
    return {"generation_config": own}
