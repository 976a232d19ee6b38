"""Load what turns images and texts into a model's inputs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dstrain import StateError, UsageError
from transformers.utils import is_torchvision_available

from dstrain_tools.captioning.model_files import ADVICE, ModelFiles

QWEN_TYPES = ("qwen2_vl", "qwen2_5_vl")
QWEN_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    # Templates lose a line break at their end, but not that of a string in them.
    "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
"""The chat format that these models were trained with (their model cards), for a message
of images and a text."""
TORCHVISION = "some processors need torchvision, which is not installed"
NAMED_IN = (
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)
"""Files that may name a processor's class, the first one first, as in transformers."""


def load_processor(files: ModelFiles, config: Any) -> Any:
    """Return the processor of a model; raises UsageError for a model that has none.

    config: The model's configuration record.
    """
    model_type = config.model_type
    processor_class = _class_of(files, config)
    if processor_class is None:
        what = f"a {model_type} model comes without a processor of images"
        raise UsageError(files.name, what, ADVICE)
    options = {"local_files_only": True, "trust_remote_code": False}
    if files.processor is not None:
        with _naming(files.processor):
            processor = processor_class.from_pretrained(files.processor, **options)
        if model_type in QWEN_TYPES and not processor.chat_template:
            processor.chat_template = QWEN_CHAT
        return processor
    if model_type not in QWEN_TYPES:
        what = (
            f"its text encoder is a {model_type} model, and has no processor of images"
        )
        raise UsageError(files.name, what, ADVICE)
    from transformers import AutoTokenizer, Qwen2VLImageProcessor

    with _naming(files.tokenizer):
        tokenizer = AutoTokenizer.from_pretrained(files.tokenizer, **options)
    # Its defaults are the settings that these models are published with.
    images = Qwen2VLImageProcessor()
    processor = processor_class(image_processor=images, tokenizer=tokenizer)
    # The tokenizer's own template may be one for texts alone.
    processor.chat_template = QWEN_CHAT
    return processor


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Raise StateError, naming a folder, for what is wrong with the files in it."""
    try:
        yield
    except (
        Exception
    ) as error:  # of transformers, tokenizers or json: it may be anything
        reason = str(error).strip().partition("\n")[0]
        what = f"cannot be loaded: {reason}"
        # Some processors cannot do without their part for videos.
        advice = [] if is_torchvision_available() else [TORCHVISION]
        raise StateError(folder, what, *advice) from error


def _class_of(files: ModelFiles, config: Any) -> Any:
    """Return the class of a model's processor: the one that its files name, else that of
    its type; None if there is none. Code beside a model is never run.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    found = None
    folder = files.processor or files.tokenizer
    for name in NAMED_IN:
        found = found or getattr(transformers, _named_in(folder / name), None)
    if found is None and type(config) in PROCESSOR_MAPPING:
        found = PROCESSOR_MAPPING[type(config)]
    if found is None or not issubclass(found, transformers.ProcessorMixin):
        return None
    return _of_images(found)


def _named_in(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes()).get("processor_class") or "")
    except (OSError, ValueError):
        return ""


def _of_images(processor_class: Any) -> Any:
    """Return a processor's class without its part for videos, where that cannot be built.

    Those parts need torchvision, which nothing else here does: frames of a video are
    shown as images.
    """
    parts = processor_class.get_attributes()
    if is_torchvision_available() or "video_processor" not in parts:
        return processor_class
    kept = [part for part in parts if part != "video_processor"]
    own = {"get_attributes": classmethod(lambda cls: list(kept))}
    return type(processor_class.__name__, (processor_class,), own)
