"""Arrangements in which FLUX's weights are published beside that of diffusers: the original files, and ComfyUI's.

Facts of the layouts: black-forest-labs/flux (`flux1-dev.safetensors`, `ae.safetensors`), the latent diffusion code it
takes its autoencoder from, and the files that ComfyUI reads and writes.
"""

from dstrain.components import Layout, Part, Row, Shapes, nth_of, same_configuration

DIT_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
VAE_PREFIXES = ("vae.", "first_stage_model.")
TEXT_ENCODER_1_PREFIXES = ("text_encoders.clip_l.",)
TEXT_ENCODER_2_PREFIXES = ("text_encoders.t5xxl.",)


def _fused(own: tuple[str, ...], file: str) -> tuple[Row, ...]:
    """Modules whose weights the file has as one, in this order and of equal size."""
    return tuple(Row(name, file, nth_of(i, len(own))) for i, name in enumerate(own))


def _qkv(shapes: Shapes, index: int) -> tuple[int, int]:
    width = shapes["img_in.weight"][0]
    return index * width, (index + 1) * width


def _query(shapes: Shapes, name: str) -> tuple[int, int]:
    return _qkv(shapes, 0)


def _key(shapes: Shapes, name: str) -> tuple[int, int]:
    return _qkv(shapes, 1)


def _value(shapes: Shapes, name: str) -> tuple[int, int]:
    return _qkv(shapes, 2)


def _after_qkv(shapes: Shapes, name: str) -> tuple[int, None]:
    return _qkv(shapes, 3)[0], None


def _embedder(own: str, file: str) -> tuple[Row, ...]:
    place = f"time_text_embed.{own}_embedder"
    return (Row(f"{place}.linear_1", f"{file}.in_layer"), Row(f"{place}.linear_2", f"{file}.out_layer"))


def _stream(file: str, norm: str, qkv: tuple[str, str, str], norms: tuple[str, str], out: str, ff: str) -> list[Row]:
    """The rows of the half for pictures (`img`) or text (`txt`) of a block that has both."""
    own, old = "transformer_blocks.*.", f"double_blocks.*.{file}_"
    return [
        Row(f"{own}{norm}.linear", f"{old}mod.lin"),
        *_fused(tuple(f"{own}attn.{name}" for name in qkv), f"{old}attn.qkv"),
        Row(f"{own}attn.{norms[0]}.weight", f"{old}attn.norm.query_norm.scale"),
        Row(f"{own}attn.{norms[1]}.weight", f"{old}attn.norm.key_norm.scale"),
        Row(f"{own}attn.{out}", f"{old}attn.proj"),
        Row(f"{own}{ff}.net.0.proj", f"{old}mlp.0"),
        Row(f"{own}{ff}.net.2", f"{old}mlp.2"),
    ]


_SINGLE = "single_transformer_blocks.*."
_PARTS: tuple[tuple[str, Part], ...] = (
    ("attn.to_q", _query),
    ("attn.to_k", _key),
    ("attn.to_v", _value),
    ("proj_mlp", _after_qkv),
)

ORIGINAL_DIT = Layout(
    marks=("img_in.weight", "double_blocks.*.img_attn.qkv.weight", "single_blocks.*.linear1.weight"),
    rows=(
        Row("x_embedder", "img_in"),
        Row("context_embedder", "txt_in"),
        *_embedder("timestep", "time_in"),
        *_embedder("text", "vector_in"),
        *_embedder("guidance", "guidance_in"),
        *_stream("img", "norm1", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
        *_stream(
            "txt",
            "norm1_context",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
            "to_add_out",
            "ff_context",
        ),
        Row(f"{_SINGLE}norm.linear", "single_blocks.*.modulation.lin"),
        *(Row(f"{_SINGLE}{own}", "single_blocks.*.linear1", part) for own, part in _PARTS),
        Row(f"{_SINGLE}attn.norm_q.weight", "single_blocks.*.norm.query_norm.scale"),
        Row(f"{_SINGLE}attn.norm_k.weight", "single_blocks.*.norm.key_norm.scale"),
        Row(f"{_SINGLE}proj_out", "single_blocks.*.linear2"),
        # The original gives shift, then scale; diffusers takes scale, then shift.
        Row("norm_out.linear", "final_layer.adaLN_modulation.1", nth_of(1, 2)),
        Row("norm_out.linear", "final_layer.adaLN_modulation.1", nth_of(0, 2)),
        Row("proj_out", "final_layer.linear"),
    ),
)


def autoencoder_rows(shapes: Shapes) -> tuple[Row, ...]:
    """The table of an autoencoder of any depth: the original counts the decoder's levels from the picture up."""
    levels = {int(name.split(".")[2]) for name in shapes if name.startswith("decoder.up.")}
    rows = [Row("encoder.conv_norm_out", "encoder.norm_out"), Row("decoder.conv_norm_out", "decoder.norm_out")]
    for half in ("encoder", "decoder"):
        middle, old = f"{half}.mid_block", f"{half}.mid"
        rows += [Row(f"{middle}.resnets.{i}", f"{old}.block_{i + 1}") for i in range(2)]
        rows += [Row(f"{middle}.attentions.0.{own}", f"{old}.attn_1.{file}") for own, file in _ATTENTION]
    rows += _levels("encoder.down_blocks.*", "encoder.down.*", "down")
    for level in levels:
        rows += _levels(f"decoder.up_blocks.{max(levels) - level}", f"decoder.up.{level}", "up")
    return tuple(rows)


_ATTENTION = (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"))


def _levels(own: str, file: str, way: str) -> list[Row]:
    return [
        Row(f"{own}.resnets.*.conv_shortcut", f"{file}.block.*.nin_shortcut"),
        Row(f"{own}.resnets.*", f"{file}.block.*"),
        Row(f"{own}.{way}samplers.0", f"{file}.{way}sample"),
    ]


ORIGINAL_VAE = Layout(
    marks=("encoder.down.*.block.*.conv1.weight", "decoder.up.*.block.*.conv1.weight"), rows=autoencoder_rows
)

# What other halves of CLIP and other programs leave in the files of a text encoder.
_LEFT_OVER = ("logit_scale", "*text_projection.weight", "*embeddings.position_ids")

PUBLISHED_TEXT_ENCODER_1 = Layout(
    marks=("text_model.embeddings.token_embedding.weight", "text_model.final_layer_norm.weight"),
    rows=(Row("", "text_model"),),
    ignored=_LEFT_OVER,
    configuration=same_configuration,
)
COMFYUI_TEXT_ENCODER_1 = Layout(
    marks=("transformer.text_model.embeddings.token_embedding.weight",),
    rows=(Row("", "transformer.text_model"),),
    ignored=_LEFT_OVER,
)
COMFYUI_TEXT_ENCODER_2 = Layout(
    marks=("transformer.shared.weight", "transformer.encoder.block.*.layer.1.DenseReluDense.wi_0.weight"),
    rows=(Row("", "transformer"),),
    ignored=_LEFT_OVER,
)

DIT_LAYOUTS = (ORIGINAL_DIT,)
VAE_LAYOUTS = (ORIGINAL_VAE,)
TEXT_ENCODER_1_LAYOUTS = (PUBLISHED_TEXT_ENCODER_1, COMFYUI_TEXT_ENCODER_1)
TEXT_ENCODER_2_LAYOUTS = (COMFYUI_TEXT_ENCODER_2,)
