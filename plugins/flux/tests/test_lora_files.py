"""LoRA files of FLUX in every program's naming: each makes of them what is trained
here, and they come back.
"""

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from dstrain import Pipeline, StateError, TrainConfig, UsageError, run
from dstrain.cli.main import main
from dstrain.models import components_of
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain_flux import LORA_ALIASES, MODEL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.layouts import assert_lora_is_loaded_as_said
from tests.support.toys import dataset, opened

BY_NAME = components_of(MODEL)
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


OPEN_SOURCE = {"align_to_opensource_format": "True"}


def config(output: Path, **flags: Any) -> TrainConfig:
    """Return a run of the toy for one step."""
    return TrainConfig(
        model="flux",
        variant="dev",
        toy=True,
        dataset_base_path=dataset("flux", "dev"),
        output_path=output,
        max_steps=1,
        learning_rate=1e-2,
        **flags,
    )


def lora_weights(network: nn.Module) -> dict[str, Tensor]:
    return {
        name: weight for name, weight in network.named_parameters() if "lora_" in name
    }


def kohyas(pipe: Pipeline, *names: str) -> dict[str, Tensor]:
    """Return a file of kohya's with layers of these components."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        reader = TestLoraFiles.readers[name]["kohya"]
        tensors |= reader.lora(pipe.components[name], 2, 1.0)
    return tensors


def test_align_to_opensource_format_saves_what_the_reference_documents_command_saves(
    tmp_path: Path,
) -> None:
    """convert_lora_format of DiffSynth-Studio's examples/flux/model_training/train.py:
    names, and alpha beside them.
    """
    loaded = []
    for name, options in (("plain", {}), ("aligned", OPEN_SOURCE)):
        targets = ",".join(LORA_ALIASES)
        run(
            config(tmp_path / name, lora_target_modules=targets, family_options=options)
        )
        pipe = opened("flux", "dev")
        pipe.load_lora(tmp_path / name / "step-1.safetensors")
        loaded.append(lora_weights(pipe.components["dit"]))
    aligned = load_file(tmp_path / "aligned/step-1.safetensors")
    double = "img_mod_lin txt_mod_lin img_attn_qkv txt_attn_qkv img_attn_proj"
    double += " txt_attn_proj img_mlp_0 img_mlp_2 txt_mlp_0 txt_mlp_2"
    layers = [f"double_blocks_0_{name}" for name in double.split()]
    for name in ("modulation_lin", "linear1", "linear2"):
        layers += [f"single_blocks_0_{name}", f"single_blocks_1_{name}"]
    ends = ("lora_down.weight", "lora_up.weight", "alpha")
    assert set(aligned) == {f"lora_unet_{one}.{end}" for one in layers for end in ends}
    plain, again = loaded
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert any(weight.any() for name, weight in plain.items() if "lora_B" in name)


@pytest.mark.parametrize(
    "flags",
    [
        {"lora_base_model": "text_encoder_1"},
        {"lora_base_model": "dit", "lora_format": "comfyui"},
    ],
)
def test_align_to_opensource_format_is_refused_where_it_would_do_nothing(
    flags: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="--align_to_opensource_format"):
        run(config(tmp_path / "out", **flags, family_options=OPEN_SOURCE))


def test_weights_in_full_that_a_program_has_no_names_for_are_refused(
    tmp_path: Path,
) -> None:
    flags = {"trainable_models": "text_encoder_1", "remove_prefix_in_ckpt": "pipe."}
    with pytest.raises(UsageError, match="--remove_prefix_in_ckpt"):
        run(config(tmp_path / "out", **flags))


@pytest.mark.parametrize("component", ["text_encoder_1", "text_encoder_2"])
def test_files_of_text_encoders_are_distinguished_by_their_prefix(
    component: str, tmp_path: Path
) -> None:
    """`text_encoder` begins `text_encoder_2`."""
    out = tmp_path / "out"
    run(config(out, lora_base_model=component))
    pipe = opened("flux", "dev")
    pipe.load_lora(out / "step-1.safetensors")
    named = [
        name for name, one in pipe.components.items() if hasattr(one, "peft_config")
    ]
    assert named == [component]


def test_a_file_of_kohyas_with_text_encoders_goes_to_each_and_names_one_that_is_not_there(
    tmp_path: Path,
) -> None:
    pipe, names = opened("flux", "dev"), ("dit", "text_encoder_1", "text_encoder_2")
    file = tmp_path / "theirs.safetensors"
    save_file(kohyas(pipe, *names), file)
    alone = Pipeline(pipe.spec, MODEL, {"dit": opened("flux", "dev").components["dit"]})
    with pytest.raises(StateError, match="text_encoder_1"):
        alone.load_lora(file)
    assert not lora_weights(alone.components["dit"])
    pipe.load_lora(file)
    assert all(lora_weights(pipe.components[name]) for name in names)


@pytest.mark.parametrize(
    ("name", "said"), [("text_encoder_1", ""), ("text_encoder_2", "text_encoder_2")]
)
def test_export_says_what_diffusers_leaves_out(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, file = opened("flux", "dev"), tmp_path / "theirs.safetensors"
    content = json.dumps(pipe.components[name].config.to_dict())
    save_file(kohyas(pipe, name), file, {"component": name, "config": content})
    words = ["export", "--model", "flux", "--format", "diffusers", str(file)]
    assert main([*words, str(tmp_path / "out.safetensors")]) == 0
    printed = capsys.readouterr().err
    assert said in printed if said else not printed


def test_diffusers_loads_lora_on_the_components_that_are_said_to_be() -> None:
    assert_lora_is_loaded_as_said(MODEL, FluxPipeline)
