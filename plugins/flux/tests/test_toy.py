"""The toy has the published layout, and diffusers loads it."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from dstrain_flux import MODEL
from dstrain_flux.toy import write
from safetensors import safe_open
from transformers import AutoTokenizer

OWN = ("controlnet-inpaint",)
"""Variants with a network that diffusers lacks."""


def test_files_are_named_as_published(toy_folder: Path) -> None:
    found = {
        str(path.relative_to(toy_folder))
        for path in toy_folder.rglob("*")
        if path.is_file()
    }
    assert {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "text_encoder_2/config.json",
        "text_encoder_2/model-00001-of-00002.safetensors",
        "text_encoder_2/model-00002-of-00002.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "tokenizer/tokenizer_config.json",
        "tokenizer_2/tokenizer_config.json",
    } <= found
    with safe_open(toy_folder / "text_encoder/model.safetensors", "pt") as file:
        # A safetensors file has keys() and is itself not iterable.
        assert {name.partition(".")[0] for name in file.keys()} == {"text_model"}  # noqa: SIM118


def test_each_of_several_processes_writes_the_whole_toy(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    write(tmp_path)
    first, second = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (toy_folder, tmp_path)
    )
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in first)


def test_sizes_replace_constructor_arguments(tmp_path: Path) -> None:
    write(
        tmp_path, sizes={"dit": {"num_layers": 2}, "text_encoder_2": {"num_layers": 3}}
    )
    configs = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("transformer", "text_encoder_2")
    ]
    assert [config["num_layers"] for config in configs] == [2, 3]
    assert configs[0]["joint_attention_dim"] == 32


@pytest.mark.filterwarnings("default", "ignore:`FluxPosEmbed`:FutureWarning")
@pytest.mark.parametrize("variant", [v for v in MODEL.variants if v not in OWN])
def test_diffusers_loads_the_folder_as_its_own_pipeline(
    variant: str, tmp_path: Path
) -> None:
    write(tmp_path, variant)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path)
    kinds = {"kontext": "Kontext", "fill": "Fill"}
    kinds |= dict.fromkeys(("controlnet", "controlnet-union"), "ControlNet")
    assert type(pipeline).__name__ == f"Flux{kinds.get(variant, '')}Pipeline"
    assert pipeline.tokenizer_max_length == 77
    assert (
        pipeline.text_encoder.config.attention_dropout
        == pipeline.text_encoder_2.config.dropout_rate
        == 0.1
    )


def test_tokenizers_load_by_their_ordinary_classes_and_know_their_special_tokens(
    toy_folder: Path,
) -> None:
    clip, t5 = (
        AutoTokenizer.from_pretrained(toy_folder / name)
        for name in ("tokenizer", "tokenizer_2")
    )
    assert (type(clip).__name__, type(t5).__name__) == ("CLIPTokenizer", "T5Tokenizer")
    text = "the dog and é 红 🙂"
    ids = clip(text).input_ids
    assert (ids[0], ids[-1]) == (clip.bos_token_id, clip.eos_token_id)
    assert clip.eos_token_id == len(clip) - 1, (
        "CLIP finds a text's end as its greatest id"
    )
    assert clip.decode(ids, skip_special_tokens=True).replace(" ", "") == text.replace(
        " ", ""
    )
    assert t5("A dog, 3").input_ids[-1] == t5.eos_token_id == 1
    assert t5.decode(t5("A dog, 3").input_ids, skip_special_tokens=True) == "A dog, 3"
    assert t5.pad_token_id == 0
