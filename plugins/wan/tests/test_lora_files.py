"""LoRA files of Wan in every program's naming: each makes of them what is trained here,
and they come back.
"""

import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from dstrain import Pipeline, StateError, TrainConfig, run
from dstrain.cli.main import main
from dstrain.config import LoraFile
from dstrain.models import components_of
from dstrain.pipeline import find_preset
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain_wan import MODEL
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.layouts import assert_lora_is_loaded_as_said
from tests.support.toys import dataset, opened, toy

BY_NAME = components_of(MODEL)
ORIGINAL_DIT, _ = BY_NAME["dit"].formats
ORIGINAL_VACE, _ = BY_NAME["vace"].formats
ORIGINAL_UMT5, _, COMFYUI_UMT5 = BY_NAME["text_encoder"].formats
DIT = MappingProxyType(
    {
        "comfyui": LoraReader(ORIGINAL_DIT, "diffusion_model."),
        "kohya": LoraReader(ORIGINAL_DIT, "lora_unet_", underscored=True),
        "diffsynth": LoraReader(ORIGINAL_DIT),
    }
)
VACE = MappingProxyType(
    {
        "comfyui": LoraReader(ORIGINAL_VACE, "diffusion_model."),
        "kohya": LoraReader(ORIGINAL_VACE, "lora_unet_", underscored=True),
        "diffsynth": LoraReader(ORIGINAL_VACE),
    }
)


NAMES = MappingProxyType(
    {
        "diffusers": "transformer.blocks.0.attn1.to_q",
        "comfyui": "diffusion_model.blocks.0.self_attn.q",
        "kohya": "lora_unet_blocks_0_self_attn_q",
        "diffsynth": "blocks.0.self_attn.q",
    }
)
VACE_NAMES = MappingProxyType(
    {program: name.replace("blocks", "vace_blocks") for program, name in NAMES.items()}
)


# For i2v, diffusers adds layers of zeros to those of a file that has none for the
# image.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
class TestLoraFiles(LoraFiles):
    family = "wan"
    everyday = ("t2v", "i2v", "i2v-a14b", "ti2v-5b", "vace")
    readers = MappingProxyType(
        {
            "dit": DIT,
            "dit2": DIT,
            "vace": VACE,
            "vace2": VACE,
            "text_encoder": {
                "comfyui": LoraReader(COMFYUI_UMT5, "text_encoders.umt5xxl."),
                "diffsynth": LoraReader(ORIGINAL_UMT5),
            },
        }
    )
    names = MappingProxyType(
        {
            "dit": NAMES,
            "dit2": NAMES,
            "vace": VACE_NAMES,
            "vace2": VACE_NAMES,
            "text_encoder": {
                "diffusers": "text_encoder.encoder.block.0.layer.0.SelfAttention.q",
                "comfyui": "text_encoders.umt5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q",
                "diffsynth": "blocks.0.attn.q",
            },
        }
    )
    targets = MappingProxyType(
        {"around": ("linear_1", "linear_2", "time_proj", "proj_out")}
    )

    @staticmethod
    def prediction(component: str, network: Any) -> Tensor:
        """Of some tokens, or of latents with other conditions."""
        if component == "text_encoder":
            text: Tensor = network(torch.tensor([[3, 1, 4, 1, 5]])).last_hidden_state
            return text
        draw, dtype = torch.Generator().manual_seed(3), network.dtype
        if component.startswith("vace"):
            return of_vace(network, draw)
        ends = 2 if network.config.pos_embed_seq_len else 1
        channels = network.config.in_channels
        shapes = ((1, channels, 2, 4, 6), (1, 512, 32), (ends, 5, 16))
        latents, prompt, seen = (
            torch.randn(*shape, generator=draw).to(dtype) for shape in shapes
        )
        image = seen if network.config.image_dim else None
        made: Tensor = network(
            latents,
            torch.tensor([500.0], dtype=dtype),
            prompt,
            image,
            return_dict=False,
        )[0]
        return made

    @staticmethod
    def load_published(case: LoraCase, file: Path, parts: dict[str, Any]) -> None:
        """Its loader gets the expert that takes the file."""
        others = {name: parts[name] for name in ("text_encoder", "tokenizer", "vae")}
        published = WanPipeline(
            **others,
            scheduler=None,
            transformer=parts["dit"],
            transformer_2=parts.get("dit2"),
        )
        second = case.component == "dit2"
        published.load_lora_weights(
            file.parent, weight_name=file.name, load_into_transformer_2=second
        )

    @staticmethod
    def published_takes(case: LoraCase, program: str) -> bool:
        """It reads no LoRA of umT5, and from others' files the layers of blocks; from
        kohya's all of them or none. VACE it has in one network with the denoiser:
        `test_conformance.py`.
        """
        return case.component in ("dit", "dit2") and (
            program == "diffusers"
            or (program != "diffsynth" and case.targets in ("default", "aliases"))
        )


def of_vace(network: Any, draw: torch.Generator) -> Tensor:
    """What the blocks of VACE add, for tokens that are always the same."""
    config, dtype = network.config, network.dtype
    width = config.num_attention_heads * config.attention_head_dim
    shapes = ((1, config.vace_in_channels, 2, 4, 6), (1, 12, width), (1, 5, width))
    context, tokens, text, modulation = (
        torch.randn(*shape, generator=draw).to(dtype)
        for shape in (*shapes, (1, 6, width))
    )
    control = network(context)
    added = []
    for block in network.vace_blocks:
        one, control = block(tokens, text, control, modulation, None)
        added.append(one)
    return torch.cat(added)


def adapted(pipe: Pipeline) -> list[str]:
    """Return the components that have LoRA layers."""
    return [
        name for name, one in pipe.components.items() if hasattr(one, "peft_config")
    ]


def trained(variant: str, output: Path, **flags: Any) -> Path:
    """Train a toy for one step; return the folder that it writes to."""
    config = TrainConfig(
        model="wan",
        variant=variant,
        toy=True,
        dataset_base_path=dataset("wan", variant),
        output_path=output,
        max_steps=1,
        **flags,
    )
    run(config)
    return output


@pytest.mark.parametrize("program", ["diffusers", "comfyui", "kohya"])
def test_a_file_of_the_denoiser_and_vace_is_read_for_each(
    program: str, tmp_path: Path
) -> None:
    alpha = None if program == "diffusers" else 3.0
    diffusers = LoraReader(None, "transformer.")
    both: dict[str, Tensor] = {}
    wanted: dict[str, dict[str, Tensor]] = {}
    for part, readers in (("dit", DIT), ("vace", VACE)):
        pipe = opened("wan", "vace")
        reader = readers.get(program, diffusers)
        tensors = reader.lora(pipe.components[part], 2, alpha)
        save_file(tensors, tmp_path / "one.safetensors")
        pipe.load_lora(tmp_path / "one.safetensors", alpha=None if alpha else "rank")
        assert adapted(pipe) == [part]
        wanted[part] = pipe.components[part].state_dict()
        both |= tensors
    file = tmp_path / "both.safetensors"
    save_file(both, file)
    pipe = opened("wan", "vace")
    pipe.load_lora(file, alpha=None if alpha else "rank")
    for part, weights in wanted.items():
        found = pipe.components[part].state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    # As a preset it is merged into both.
    preset = LoraFile(file, alpha=None if alpha else "rank")
    assert find_preset(preset, None, MODEL, pipe.spec).components == ("dit", "vace")


def test_the_file_of_an_expert_says_which_it_is_of_in_every_programs_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its names are those of the other expert's, too: without its header it goes to
    neither.
    """
    flags = {"lora_base_model": "dit2", "learning_rate": 1e-2}
    targets = "q,k,v,o,ffn.0,ffn.2"
    out = trained("t2v-a14b", tmp_path, lora_target_modules=targets, **flags)
    for program in ("diffusers", "comfyui"):
        file = tmp_path / f"{program}.safetensors"
        words = ["export", "--format", program, str(out / "step-1.safetensors")]
        assert main([*words, str(file)]) == 0
        said = capsys.readouterr().out
        assert all(one in said for one in ("20 layers", "dit2", "0 to 875"))
        with safe_open(file, framework="pt") as content:
            header = content.metadata()
        assert (header["component"], header["timesteps"]) == ("dit2", "0 to 875")
        pipe = opened("wan", "t2v-a14b")
        pipe.load_lora(file)
        assert adapted(pipe) == ["dit2"]
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tmp_path / "comfyui.safetensors"), bare)
    with pytest.raises(StateError, match="dit and dit2") as caught:
        opened("wan", "t2v-a14b").load_lora(bare)
    # The advice, typed; and both experts from files that say nothing.
    named = re.findall(r"dit2?=\S+", str(caught.value))
    assert [one.partition("=")[0] for one in named] == ["dit", "dit2"]
    chosen = [("--lora", one) for one in named]
    words = ["generate", "--model_id", str(toy("wan", "t2v-a14b"))]
    words += ["--variant", "t2v-a14b", "--prompt", "a", "--height", "32"]
    words += ["--width", "32"]
    words += ["--num_frames", "5", "--num_inference_steps", "2", "--output"]
    videos = []
    for number, loras in enumerate(((), chosen[0], chosen[1], sum(chosen, ()))):
        output = tmp_path / f"{number}.mp4"
        assert main([*words, str(output), *loras]) == 0
        videos.append(output.read_bytes())
    assert len(set(videos)) == 4


def test_the_references_prefix_tells_the_experts_apart(tmp_path: Path) -> None:
    for part in ("dit", "dit2"):
        pipe = opened("wan", "t2v-a14b")
        tensors = DIT["diffsynth"].lora(pipe.components[part], 2, None)
        named = {f"pipe.{part}.{key}": tensor for key, tensor in tensors.items()}
        save_file(named, tmp_path / "theirs.safetensors")
        pipe.load_lora(tmp_path / "theirs.safetensors")
        assert adapted(pipe) == [part]


def test_kohya_files_with_two_underscores_are_read(tmp_path: Path) -> None:
    """As VideoX-Fun writes them, and ComfyUI's comfy/lora_convert.py reads them."""
    pipe = opened("wan", "i2v")
    tensors = DIT["kohya"].lora(pipe.components["dit"], 2, 1.0)
    theirs = {
        key.replace("lora_unet_", "lora_unet__"): tensor
        for key, tensor in tensors.items()
    }
    assert any("cross_attn_k_img.lora_down" in key for key in theirs)
    save_file(theirs, tmp_path / "theirs.safetensors")
    there, _ = DIT["kohya"].read(pipe.components["dit"], tensors)
    pipe.load_lora(tmp_path / "theirs.safetensors")
    with torch.no_grad():
        made, wanted = (
            TestLoraFiles.prediction("dit", one)
            for one in (pipe.components["dit"].double(), there)
        )
    assert (made - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_a_distilled_lora_of_2_1_is_used_on_2_2_without_what_that_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As LightX2V and others convert them: pairs, and differences of biases, norms and
    modulations. Wan 2.2 has no image encoder, and so no k_img, v_img and img_emb.
    """
    older = opened("wan", "i2v").components["dit"]
    tensors = DIT["comfyui"].lora(older, 2, None)
    width = older.config.num_attention_heads * older.config.attention_head_dim
    for name, shape in {
        "blocks.0.diff_m": (1, 6, width),
        "head.diff_m": (1, 2, width),
        "blocks.1.cross_attn.norm_q.diff": (width,),
        "blocks.1.cross_attn.norm_k_img.diff": (width,),
        "blocks.0.ffn.2.diff_b": (width,),
        "img_emb.proj.0.diff_b": (older.config.image_dim,),
    }.items():
        tensors[f"diffusion_model.{name}"] = torch.full(shape, 0.5)
    file = tmp_path / "distilled.safetensors"
    save_file(tensors, file)
    pipe = opened("wan", "i2v-a14b")
    # As it was typed.
    with pytest.raises(StateError, match=f"dit={file}@alpha=rank@skip_missing"):
        pipe.load_lora(file, component="dit", alpha="rank")
    dit = pipe.components["dit"]
    before = {key: one.clone() for key, one in dit.state_dict().items()}
    pipe.load_lora(file, 0.5, "dit", "rank", True)
    printed = capsys.readouterr().err
    for name in ("blocks.*.cross_attn.k_img", "img_emb.proj.*", "norm_k_img.diff"):
        assert name in printed
    for name, scale in {
        "blocks.0.scale_shift_table": 0.25,
        "scale_shift_table": 0.25,
        "blocks.1.attn2.norm_q.weight": 0.25,
        "blocks.1.scale_shift_table": 0.0,
    }.items():
        torch.testing.assert_close(dit.get_parameter(name), before[name] + scale)
    bias = dit.blocks[0].ffn.net[2].base_layer.bias
    assert torch.equal(bias, before["blocks.0.ffn.net.2.bias"] + 0.25)
    assert adapted(pipe) == ["dit"]
    # Below training, as a preset of one expert.
    preset = f"{file}:0.5@alpha=rank@skip_missing"
    flags = {"lora_base_model": "dit2", "preset_lora_path": Path(f"dit2={preset}")}
    out = trained("i2v-a14b", tmp_path / "out", **flags)
    recorded = json.loads((out / "logs/config.json").read_bytes())
    assert recorded["preset_lora_model"] == "dit2"
    assert recorded["preset_lora_path"] == preset


def test_diffusers_loads_lora_on_the_components_that_are_said_to_be() -> None:
    assert_lora_is_loaded_as_said(MODEL, WanPipeline, "transformer_2")
