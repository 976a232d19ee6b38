"""Arrangements in which FLUX's weights are published beside that of diffusers: the
original files, and ComfyUI's.

Facts of the layouts: black-forest-labs/flux (`flux1-dev.safetensors`,
`ae.safetensors`), the latent diffusion code it takes its autoencoder from, and the
files that ComfyUI reads and writes.
"""

from functools import partial

from dstrain.plugin import (
    CheckpointFormat,
    KeyMap,
    LoraKeyFormat,
    Shapes,
    nth_of,
    same_config,
)

DIT_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
VAE_PREFIXES = ("vae.", "first_stage_model.")
TEXT_ENCODER_1_PREFIXES = ("text_encoders.clip_l.",)
TEXT_ENCODER_2_PREFIXES = ("text_encoders.t5xxl.",)


def _fused(own: tuple[str, ...], file: str) -> tuple[KeyMap, ...]:
    """Modules whose weights the file has as one, in this order and of equal size."""
    return tuple(KeyMap(name, file, nth_of(i, len(own))) for i, name in enumerate(own))


def _rows_of(
    first: int, last: int | None, embedder: str, shapes: Shapes, name: str
) -> tuple[int, int | None]:
    width = shapes[embedder][0]
    return first * width, None if last is None else last * width


def _qkv_and_mlp(file: str, embedder: str) -> tuple[KeyMap, ...]:
    """Map the first linear layers of a block for both, whose weights the file has as
    one: three of the width, one wider.

    embedder: the weight in the file whose rows are as many as the width.
    """
    parts = (
        ("attn.to_q", 0, 1),
        ("attn.to_k", 1, 2),
        ("attn.to_v", 2, 3),
        ("proj_mlp", 3, None),
    )
    return tuple(
        KeyMap(f"{_SINGLE}{own}", file, partial(_rows_of, first, last, embedder))
        for own, first, last in parts
    )


def _embedder(own: str, file: str) -> tuple[KeyMap, ...]:
    place = f"time_text_embed.{own}_embedder"
    return (
        KeyMap(f"{place}.linear_1", f"{file}.in_layer"),
        KeyMap(f"{place}.linear_2", f"{file}.out_layer"),
    )


def _stream(
    file: str,
    norm: str,
    qkv: tuple[str, str, str],
    norms: tuple[str, str],
    out: str,
    ff: str,
) -> list[KeyMap]:
    """Return the rows of the half for images (`img`) or text (`txt`) of a block that
    has both.
    """
    own, old = "transformer_blocks.*.", f"double_blocks.*.{file}_"
    return [
        KeyMap(f"{own}{norm}.linear", f"{old}mod.lin"),
        *_fused(tuple(f"{own}attn.{name}" for name in qkv), f"{old}attn.qkv"),
        KeyMap(f"{own}attn.{norms[0]}.weight", f"{old}attn.norm.query_norm.scale"),
        KeyMap(f"{own}attn.{norms[1]}.weight", f"{old}attn.norm.key_norm.scale"),
        KeyMap(f"{own}attn.{out}", f"{old}attn.proj"),
        KeyMap(f"{own}{ff}.net.0.proj", f"{old}mlp.0"),
        KeyMap(f"{own}{ff}.net.2", f"{old}mlp.2"),
    ]


_SINGLE = "single_transformer_blocks.*."

ORIGINAL_DIT = CheckpointFormat(
    key_patterns=(
        "img_in.weight",
        "double_blocks.*.img_attn.qkv.weight",
        "single_blocks.*.linear1.weight",
    ),
    rows=(
        KeyMap("x_embedder", "img_in"),
        KeyMap("context_embedder", "txt_in"),
        *_embedder("timestep", "time_in"),
        *_embedder("text", "vector_in"),
        *_embedder("guidance", "guidance_in"),
        *_stream(
            "img",
            "norm1",
            ("to_q", "to_k", "to_v"),
            ("norm_q", "norm_k"),
            "to_out.0",
            "ff",
        ),
        *_stream(
            "txt",
            "norm1_context",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
            "to_add_out",
            "ff_context",
        ),
        KeyMap(f"{_SINGLE}norm.linear", "single_blocks.*.modulation.lin"),
        *_qkv_and_mlp("single_blocks.*.linear1", "img_in.weight"),
        KeyMap(f"{_SINGLE}attn.norm_q.weight", "single_blocks.*.norm.query_norm.scale"),
        KeyMap(f"{_SINGLE}attn.norm_k.weight", "single_blocks.*.norm.key_norm.scale"),
        KeyMap(f"{_SINGLE}proj_out", "single_blocks.*.linear2"),
        # The original gives shift, then scale; diffusers takes scale, then shift.
        KeyMap("norm_out.linear", "final_layer.adaLN_modulation.1", nth_of(1, 2)),
        KeyMap("norm_out.linear", "final_layer.adaLN_modulation.1", nth_of(0, 2)),
        KeyMap("proj_out", "final_layer.linear"),
    ),
)


def _reference_stream(
    file: str, norm: str, qkv: tuple[str, str, str], out: str, ff: str
) -> list[KeyMap]:
    """Return the rows of the half for images (`a`) or text (`b`) of a block that has
    both.
    """
    own, old, norms = "transformer_blocks.*.", "blocks.*.", ("norm_q", "norm_k")
    mine = norms if file == "a" else ("norm_added_q", "norm_added_k")
    return [
        KeyMap(f"{own}{norm}.linear", f"{old}norm1_{file}.linear"),
        *_fused(tuple(f"{own}attn.{name}" for name in qkv), f"{old}attn.{file}_to_qkv"),
        *(
            KeyMap(f"{own}attn.{name}", f"{old}attn.{theirs}_{file}")
            for name, theirs in zip(mine, norms, strict=True)
        ),
        KeyMap(f"{own}attn.{out}", f"{old}attn.{file}_to_out"),
        KeyMap(f"{own}{ff}.net.0.proj", f"{old}ff_{file}.0"),
        KeyMap(f"{own}{ff}.net.2", f"{old}ff_{file}.2"),
    ]


def _reference_embedder(own: str, file: str) -> tuple[KeyMap, ...]:
    return tuple(
        KeyMap(f"time_text_embed.{own}_embedder.linear_{i + 1}", f"{file}.{2 * i}")
        for i in range(2)
    )


# The names of the DiT of modelscope/DiffSynth-Studio (diffsynth/models/flux_dit.py and,
# beside the original names, utils/state_dict_converters/flux_dit.py), which are those
# of the reference documents' --lora_target_modules.
REFERENCE_DIT = CheckpointFormat(
    key_patterns=(
        "x_embedder.weight",
        "blocks.*.attn.a_to_qkv.weight",
        "single_blocks.*.to_qkv_mlp.weight",
    ),
    rows=(
        *_reference_embedder("timestep", "time_embedder.timestep_embedder"),
        *_reference_embedder("text", "pooled_text_embedder"),
        *_reference_embedder("guidance", "guidance_embedder.timestep_embedder"),
        *_reference_stream("a", "norm1", ("to_q", "to_k", "to_v"), "to_out.0", "ff"),
        *_reference_stream(
            "b",
            "norm1_context",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            "to_add_out",
            "ff_context",
        ),
        KeyMap(f"{_SINGLE}norm.linear", "single_blocks.*.norm.linear"),
        *_qkv_and_mlp("single_blocks.*.to_qkv_mlp", "x_embedder.weight"),
        KeyMap(f"{_SINGLE}attn.norm_q.weight", "single_blocks.*.norm_q_a.weight"),
        KeyMap(f"{_SINGLE}attn.norm_k.weight", "single_blocks.*.norm_k_a.weight"),
        KeyMap(f"{_SINGLE}proj_out", "single_blocks.*.proj_out"),
        KeyMap("norm_out.linear", "final_norm_out.linear", nth_of(1, 2)),
        KeyMap("norm_out.linear", "final_norm_out.linear", nth_of(0, 2)),
        KeyMap("proj_out", "final_proj_out"),
    ),
)


def autoencoder_rows(shapes: Shapes) -> tuple[KeyMap, ...]:
    """Return the table of an autoencoder of any depth: the original counts the
    decoder's levels from the picture up.
    """
    levels = {
        int(name.split(".")[2]) for name in shapes if name.startswith("decoder.up.")
    }
    rows = [
        KeyMap("encoder.conv_norm_out", "encoder.norm_out"),
        KeyMap("decoder.conv_norm_out", "decoder.norm_out"),
    ]
    for half in ("encoder", "decoder"):
        middle, old = f"{half}.mid_block", f"{half}.mid"
        rows += [
            KeyMap(f"{middle}.resnets.{i}", f"{old}.block_{i + 1}") for i in range(2)
        ]
        rows += [
            KeyMap(f"{middle}.attentions.0.{own}", f"{old}.attn_1.{file}")
            for own, file in _ATTENTION
        ]
    rows += _levels("encoder.down_blocks.*", "encoder.down.*", "down")
    for level in levels:
        rows += _levels(
            f"decoder.up_blocks.{max(levels) - level}", f"decoder.up.{level}", "up"
        )
    return tuple(rows)


_ATTENTION = (
    ("group_norm", "norm"),
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("to_out.0", "proj_out"),
)


def _levels(own: str, file: str, way: str) -> list[KeyMap]:
    return [
        KeyMap(f"{own}.resnets.*.conv_shortcut", f"{file}.block.*.nin_shortcut"),
        KeyMap(f"{own}.resnets.*", f"{file}.block.*"),
        KeyMap(f"{own}.{way}samplers.0", f"{file}.{way}sample"),
    ]


ORIGINAL_VAE = CheckpointFormat(
    key_patterns=(
        "encoder.down.*.block.*.conv1.weight",
        "decoder.up.*.block.*.conv1.weight",
    ),
    rows=autoencoder_rows,
)

_LAYER = "encoder.layers.*"
# What other halves of CLIP and other programs leave in the files of a text encoder.
_LEFT_OVER = ("logit_scale", "*text_projection.weight", "*embeddings.position_ids")

PUBLISHED_TEXT_ENCODER_1 = CheckpointFormat(
    key_patterns=(
        "text_model.embeddings.token_embedding.weight",
        "text_model.final_layer_norm.weight",
    ),
    rows=(KeyMap("", "text_model"),),
    ignored=_LEFT_OVER,
    configuration=same_config,
)
COMFYUI_TEXT_ENCODER_1 = CheckpointFormat(
    key_patterns=("transformer.text_model.embeddings.token_embedding.weight",),
    rows=(KeyMap("", "transformer.text_model"),),
    ignored=_LEFT_OVER,
)
COMFYUI_TEXT_ENCODER_2 = CheckpointFormat(
    key_patterns=(
        "transformer.shared.weight",
        "transformer.encoder.block.*.layer.1.DenseReluDense.wi_0.weight",
    ),
    rows=(KeyMap("", "transformer"),),
    ignored=_LEFT_OVER,
)

# Of LoRA files alone; diffsynth/utils/state_dict_converters/flux_text_encoder_clip.py.
REFERENCE_TEXT_ENCODER_1 = CheckpointFormat(
    key_patterns=(),
    rows=(
        *(
            KeyMap(f"{_LAYER}.self_attn.{part}_proj", f"encoders.*.attn.to_{part}")
            for part in ("q", "k", "v", "out")
        ),
        *(
            KeyMap(f"{_LAYER}.mlp.{part}", f"encoders.*.{part}")
            for part in ("fc1", "fc2")
        ),
        KeyMap("embeddings.token_embedding", "token_embedding"),
    ),
)

DIT_LAYOUTS = (ORIGINAL_DIT, REFERENCE_DIT)
VAE_LAYOUTS = (ORIGINAL_VAE,)
TEXT_ENCODER_1_LAYOUTS = (PUBLISHED_TEXT_ENCODER_1, COMFYUI_TEXT_ENCODER_1)
TEXT_ENCODER_2_LAYOUTS = (COMFYUI_TEXT_ENCODER_2,)

# Names in LoRA files. ComfyUI: comfy/lora.py, model_lora_keys_clip. kohya:
# networks/lora_flux.py of sd-scripts, which calls T5 `te3`; OneTrainer, whose files
# ComfyUI takes too, calls it `te2`.
DIT_LORA = (LoraKeyFormat("diffsynth", ("", "pipe.dit."), REFERENCE_DIT),)
TEXT_ENCODER_1_LORA = (
    # diffusers reads both, and before version 5 of transformers only the second.
    LoraKeyFormat("diffusers", ("text_encoder.", "text_encoder.text_model.")),
    LoraKeyFormat("comfyui", ("text_encoders.clip_l.transformer.text_model.",)),
    LoraKeyFormat(
        "kohya", ("lora_te1_text_model_", "lora_te_text_model_"), underscored=True
    ),
    LoraKeyFormat("diffsynth", ("", "pipe.text_encoder_1."), REFERENCE_TEXT_ENCODER_1),
)
TEXT_ENCODER_2_LORA = (
    LoraKeyFormat("comfyui", ("text_encoders.t5xxl.transformer.",)),
    LoraKeyFormat("kohya", ("lora_te3_", "lora_te2_"), underscored=True),
)
