"""Find the files of an image-to-text model, downloading those that are missing.

Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dstrain import MissingFiles, StateError, UsageError
from dstrain.models import ModelSource, chosen_hub, fetch, located, pipeline_class
from dstrain.plugin import read_limited

CONFIG = "config.json"
SAFETENSORS = ".safetensors"
ENCODER, TOKENIZER, PROCESSOR = "text_encoder", "tokenizer", "processor"
"""Folders of a pipeline of diffusers, which a text encoder that reads images may be in."""
SMALL = ("*.json", "*.txt", "*.jinja", "*.model")
"""Patterns of the files of tokenizers and processors beside the weights of a model."""
ADVICE = (
    "a model that writes captions: Qwen/Qwen-Image (its text encoder), Qwen/Qwen2.5-VL-7B-Instruct, "
    "or another image-to-text model of transformers"
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model on this machine."""

    name: str
    """As it is written on a command line."""
    weights: Path
    """The folder of config.json and the weights."""
    tokenizer: Path
    processor: Path | None
    """The folder of the image processor's settings; None where there are none, as in a
    pipeline whose text encoder is otherwise shown no image."""
    is_pipeline: bool
    """Whether it is the text encoder of a model that generates images."""

    @property
    def pipeline_class(self) -> str:
        """Return the name of the pipeline's class in diffusers; '' where nothing tells."""
        return pipeline_class(self.weights.parent) if self.is_pipeline else ""

    def config(self) -> Mapping[str, Any]:
        """Return the content of config.json; raises StateError."""
        path = self.weights / CONFIG
        try:
            content = json.loads(read_limited(path))
        except FileNotFoundError as error:
            raise MissingFiles(path, "does not exist") from error
        except ValueError as error:
            raise StateError(path, f"is not valid JSON: {error}") from error
        if not isinstance(content, dict) or "model_type" not in content:
            what = "does not say what model it is: it has no model_type"
            raise UsageError(path, what, ADVICE)
        return content

    def weight_files(self) -> list[Path]:
        """Return the files of weights; raises MissingFiles."""
        from dstrain.models import weight_sets  # it imports torch

        found = weight_sets(self.weights.glob(f"*{SAFETENSORS}"))
        # Publishers may add the same weights in the format of another program.
        named = [one for one in found if one[0].name.startswith("model")] or found
        if not named:
            raise MissingFiles(
                self.weights,
                f"has no {SAFETENSORS} files",
                "files of other formats may hold programs, and are not read",
            )
        return named[0]


def find_model(
    model_id: str, hub: Literal["modelscope", "huggingface"] | None
) -> ModelFiles:
    """Return the files of a model: of a folder, or of a published model.

    Raises UsageError for what is no such model, and what the hub raises.

    Args:
        model_id: A folder, ID or ID@REVISION.
        hub: The hub to download from, None for the default.
    """
    where = located(model_id, ())
    if isinstance(where, ModelSource):
        source = replace(where, hub=chosen_hub(hub))
        if source.folder.exists() or source.snapshot is None:
            return _published(source)
        where = source.snapshot
    if where.is_file():
        what = f"{where} is a file; expected the folder of a model, or a published id"
        raise UsageError("--model_id", what, ADVICE)
    if (where / ENCODER / CONFIG).is_file():
        return _pipeline(model_id, where)
    if (where / CONFIG).is_file():
        return ModelFiles(model_id, where, where, where, is_pipeline=False)
    what = f"{where} has neither {CONFIG} nor {ENCODER}/{CONFIG}"
    raise UsageError("--model_id", what, ADVICE)


def _pipeline(name: str, folder: Path) -> ModelFiles:
    processor = folder / PROCESSOR
    tokenizer = folder / TOKENIZER
    if not (processor.is_dir() or tokenizer.is_dir()):
        raise MissingFiles(folder, f"has neither {TOKENIZER} nor {PROCESSOR}")
    return ModelFiles(
        name,
        folder / ENCODER,
        tokenizer if tokenizer.is_dir() else processor,
        processor if processor.is_dir() else None,
        is_pipeline=True,
    )


def _published(source: ModelSource) -> ModelFiles:
    if not _is_pipeline(source):
        for pattern in (CONFIG, f"model*{SAFETENSORS}"):
            fetch(source, pattern)
        for pattern in SMALL:
            if source.has(pattern):
                fetch(source, pattern)
        folder = source.folder
        return ModelFiles(source.named, folder, folder, folder, is_pipeline=False)
    for pattern in (f"{ENCODER}/{CONFIG}", f"{ENCODER}/model*{SAFETENSORS}"):
        fetch(source, pattern)
    has_processor = source.has(f"{PROCESSOR}/")
    if has_processor:
        fetch(source, f"{PROCESSOR}/")
    if not has_processor or source.has(f"{TOKENIZER}/"):
        fetch(source, f"{TOKENIZER}/")
    return _pipeline(source.named, source.folder)


def _is_pipeline(source: ModelSource) -> bool:
    """Return whether a published model is a pipeline, by its files on this machine or by
    what the hub lists.
    """
    for name, answer in ((f"{ENCODER}/{CONFIG}", True), (CONFIG, False)):
        if source.has(name):
            return answer
    try:
        fetch(source, CONFIG)
    except MissingFiles as error:
        raise MissingFiles(source.folder, error.what, *error.help_lines) from error
    except StateError:
        # The hub has none there; if it has no such model, the next request says so.
        return True
    # Some pipelines have such a file, too; what the hub lists is known now.
    return source.has(f"{ENCODER}/{CONFIG}")
