"""LoRA files of FLUX in every program's naming: each makes of them what is trained
here, and they come back.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from dstrain import Pipeline, StateError, UsageError, run
from dstrain.cli.main import main
from dstrain.lora import key_formats
from dstrain.models import components_of
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.trained_sets import TrainedSet
from dstrain_flux import LORA_ALIASES, MODEL
from dstrain_flux.components import COMPONENTS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BY_NAME = {component.name: component for component in COMPONENTS}
ORIGINAL_DIT, REFERENCE_DIT = BY_NAME["dit"].formats
PUBLISHED_CLIP, COMFYUI_CLIP = BY_NAME["text_encoder_1"].formats
REFERENCE_CLIP = BY_NAME["text_encoder_1"].lora[-1].checkpoint_format
(COMFYUI_T5,) = BY_NAME["text_encoder_2"].formats
FUSED = tuple(name for name in LORA_ALIASES if name != "to_qkv_mlp")


class TestLoraFiles(LoraFiles):
    family = "flux"
    everyday = ("dev", "kontext")
    readers = MappingProxyType(
        {
            "dit": {
                "comfyui": LoraReader(ORIGINAL_DIT, "diffusion_model."),
                "kohya": LoraReader(ORIGINAL_DIT, "lora_unet_", underscored=True),
                "diffsynth": LoraReader(REFERENCE_DIT),
            },
            "text_encoder_1": {
                "comfyui": LoraReader(COMFYUI_CLIP, "text_encoders.clip_l."),
                "kohya": LoraReader(PUBLISHED_CLIP, "lora_te1_", underscored=True),
                "diffsynth": LoraReader(REFERENCE_CLIP),
            },
            "text_encoder_2": {
                "comfyui": LoraReader(COMFYUI_T5, "text_encoders.t5xxl."),
                "kohya": LoraReader(None, "lora_te3_", underscored=True),
                "diffsynth": LoraReader(None),
            },
        }
    )
    names = MappingProxyType(
        {
            "dit": {
                "diffusers": "transformer.transformer_blocks.0.attn.to_q",
                "comfyui": "diffusion_model.double_blocks.0.img_attn.qkv",
                "kohya": "lora_unet_double_blocks_0_img_attn_qkv",
                "diffsynth": "blocks.0.attn.a_to_qkv",
            },
            "text_encoder_1": {
                "diffusers": "text_encoder.encoder.layers.0.self_attn.q_proj",
                "comfyui": "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn.q_proj",
                "kohya": "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
                "diffsynth": "encoders.0.attn.to_q",
            },
            "text_encoder_2": {
                "diffusers": "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
                "comfyui": "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q",
                "kohya": "lora_te3_encoder_block_0_layer_0_SelfAttention_q",
                "diffsynth": "encoder.block.0.layer.0.SelfAttention.q",
            },
        }
    )
    # Of fused layers one slice or two; what is turned round and what is in no block;
    # what diffusers' converter takes at this width: that of the published model is
    # written into it for `linear1`, which to_qkv_mlp is.
    targets = MappingProxyType(
        {
            "without linear1": FUSED,
            "slices": ("attn.to_k", "attn.add_q_proj", "attn.add_v_proj", "proj_mlp"),
            "around": (
                "x_embedder",
                "context_embedder",
                "linear_1",
                "linear_2",
                "norm_out.linear",
                "proj_out",
            ),
        }
    )

    @staticmethod
    def prediction(component: str, network: Any) -> Tensor:
        """Of some tokens, with other conditions for the transformer."""
        if component != "dit":
            text: Tensor = network(torch.tensor([[3, 1, 4, 1, 5]])).last_hidden_state
            return text
        draw, dtype = torch.Generator().manual_seed(3), network.dtype
        latents, prompt, pooled = (
            torch.randn(1, *s, generator=draw).to(dtype)
            for s in ((6, network.config.in_channels), (5, 32), (32,))
        )
        time = torch.full((1,), 0.5, dtype=dtype)
        guidance = time if network.config.guidance_embeds else None
        ids = (torch.zeros(6, 3, dtype=dtype), torch.zeros(5, 3, dtype=dtype))
        made: Tensor = network(
            latents, prompt, pooled, time, *ids, guidance, return_dict=False
        )[0]
        return made

    @staticmethod
    def load_published(case: LoraCase, file: Path, parts: dict[str, Any]) -> None:
        """diffusers calls CLIP `text_encoder` and T5 `text_encoder_2`."""
        texts = [
            parts[f"{part}_{i}"]
            for i in (1, 2)
            for part in ("text_encoder", "tokenizer")
        ]
        published = FluxPipeline(None, parts["vae"], *texts, parts["dit"])
        published.load_lora_weights(file.parent, weight_name=file.name)

    @staticmethod
    def published_takes(case: LoraCase, program: str) -> bool:
        """It reads no LoRA of T5, and of other programs' what its converter has names
        and widths for.
        """
        if case.component != "dit":
            return case.component == "text_encoder_1" and program != "diffsynth"
        return program == "diffusers" or (
            program != "diffsynth" and case.targets == "without linear1"
        )


def test_weights_in_full_that_a_program_has_no_names_for_are_refused(
    subject: FamilyUnderTest,
) -> None:
    config = subject.config(
        TrainedSet(("text_encoder_1",)), remove_prefix_in_ckpt="pipe."
    )
    with pytest.raises(
        UsageError,
        match="--remove_prefix_in_ckpt: diffsynth has no key names for all of text_enc",
    ):
        run(config)


@pytest.fixture
def subject(tmp_path: Path) -> FamilyUnderTest:
    return FamilyUnderTest(MODEL, "dev", tmp_path)


OPEN_SOURCE = {"align_to_opensource_format": "True"}


def test_align_to_opensource_format_saves_what_the_reference_documents_command_saves(
    subject: FamilyUnderTest,
) -> None:
    """convert_lora_format of DiffSynth-Studio's examples/flux/model_training/train.py:
    names, and alpha beside them.
    """
    targets = "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear,norm1_a.linear"
    common = {
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lora_target_modules": f"{targets},norm1_b.linear,to_qkv_mlp",
    }
    made = {}
    for name, options in (("plain", {}), ("aligned", OPEN_SOURCE)):
        output = subject.folder / name
        config = subject.config(
            TrainedSet(lora="dit"), **common, output_path=output, family_options=options
        )
        run(replace(config, feature_cache=None))
        made[name] = output / "step-1.safetensors"
    aligned = load_file(made["aligned"])
    double = [
        "img_mod_lin",
        "txt_mod_lin",
        "img_attn_qkv",
        "txt_attn_qkv",
        "img_attn_proj",
        "txt_attn_proj",
    ]
    double += [f"{half}_mlp_{i}" for half in ("img", "txt") for i in (0, 2)]
    wanted = [f"lora_unet_double_blocks_0_{name}" for name in double]
    wanted += [
        f"lora_unet_single_blocks_{i}_{name}"
        for i in (0, 1)
        for name in ("modulation_lin", "linear1", "linear2")
    ]
    ends = ("lora_down.weight", "lora_up.weight", "alpha")
    assert set(aligned) == {f"{name}.{end}" for name in wanted for end in ends}
    loaded = []
    for file in made.values():
        pipeline = subject.open()
        pipeline.load_lora(file)
        loaded.append(lora_weights(pipeline.components["dit"]))
    assert loaded[0].keys() == loaded[1].keys() and all(
        torch.equal(loaded[0][n], loaded[1][n]) for n in loaded[0]
    )
    assert any(weight.any() for name, weight in loaded[0].items() if "lora_B" in name)


def lora_weights(network: nn.Module) -> dict[str, Tensor]:
    return {
        name: weight for name, weight in network.named_parameters() if "lora_" in name
    }


def test_align_to_opensource_format_is_refused_where_it_would_do_nothing(
    subject: FamilyUnderTest,
) -> None:
    config = subject.config(
        TrainedSet(lora="text_encoder_1"), family_options=OPEN_SOURCE
    )
    with pytest.raises(
        UsageError,
        match="--align_to_opensource_format: has no effect: no LoRA on dit is trained",
    ):
        run(config)
    config = subject.config(
        TrainedSet(lora="dit"), family_options=OPEN_SOURCE, lora_format="comfyui"
    )
    with pytest.raises(
        UsageError,
        match="--align_to_opensource_format: has no effect with --lora_format comfyui",
    ):
        run(config)
    assert (
        main(
            [
                "generate",
                "--model",
                "flux",
                "--toy",
                "--prompt",
                "a",
                "--align_to_opensource_format",
            ]
        )
        == 2
    )


def test_a_file_of_kohyas_with_text_encoders_goes_to_each_and_names_the_one_that_is_not_there(
    subject: FamilyUnderTest,
) -> None:
    tensors = {}
    for name in ("dit", "text_encoder_1", "text_encoder_2"):
        tensors |= TestLoraFiles.readers[name]["kohya"].lora(
            subject.pipeline.components[name], 2, 1.0
        )
    file = subject.folder / "theirs.safetensors"
    save_file(tensors, file)
    pipeline = subject.open()
    pipeline.load_lora(file)
    assert all(
        lora_weights(pipeline.components[name])
        for name in ("dit", "text_encoder_1", "text_encoder_2")
    )
    alone = Pipeline(subject.spec, MODEL, {"dit": subject.open().components["dit"]})
    with pytest.raises(
        StateError, match="layers for text_encoder_1, which is not loaded"
    ):
        alone.load_lora(file)
    assert not lora_weights(alone.components["dit"])


def test_diffusers_loads_lora_on_the_components_that_are_said_to_be() -> None:
    loaded = {
        prefix
        for name, prefix in MODEL.lora_prefixes.items()
        if key_formats(components_of(MODEL)[name], MODEL)["diffusers"].is_loaded
    }
    assert loaded == set(FluxPipeline._lora_loadable_modules)


def test_export_says_what_diffusers_leaves_out(
    subject: FamilyUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {}
    for name in ("text_encoder_1", "text_encoder_2"):
        reader = TestLoraFiles.readers[name]["kohya"]
        tensors = reader.lora(subject.pipeline.components[name], 2, 1.0)
        file = subject.folder / f"{name}.safetensors"
        header = {
            "config": json.dumps(subject.pipeline.components[name].config.to_dict())
        }
        save_file(tensors, file, {"component": name, **header})
        output = subject.folder / f"{name}-out.safetensors"
        words = ["export", "--model", "flux", "--format", "diffusers"]
        assert main([*words, str(file), str(output)]) == 0
        printed[name] = capsys.readouterr().err
    assert printed["text_encoder_1"] == ""
    assert printed["text_encoder_2"] == (
        "dstrain: warning: diffusers: its pipelines load no LoRA on text_encoder_2, "
        "without an error\n"
    )
