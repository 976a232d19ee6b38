"""Qwen-Image's variants: which units each has, and where its inputs come from."""

from dataclasses import replace

from dstrain.plugin import (
    Column,
    Constant,
    EntryCount,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
    at_least,
    functional,
)

from dstrain_qwen_image import control, entities, inpaint, layers, model_fn, units

SIDE_MULTIPLE = model_fn.DOWNSCALE * model_fn.PATCH
LEAST_PIXELS = units.EDIT_MULTIPLE**2

# The published scheduler_config.json; training_mu is the mu of the base size.
SCHEDULE = FlowMatchSchedule(
    base_mu=0.5,
    max_mu=0.9,
    base_tokens=256,
    max_tokens=8192,
    training_mu=0.8,
    shift_terminal=0.02,
    latents_per_token=model_fn.PATCH**2,
)

# In the last block, what the text's tokens ask for and what follows is thrown away.
UNUSED_IN_DIT = (
    "transformer_blocks.{last}.attn.add_q_proj.*",
    "transformer_blocks.{last}.attn.norm_added_q.*",
    "transformer_blocks.{last}.attn.to_add_out.*",
    "transformer_blocks.{last}.txt_mlp.*",
)

SAMPLING = {"num_inference_steps": 50, "guidance_scale": 4.0, "negative_prompt": " "}

BASE = PipelineSpec(
    components=("dit", "text_encoder", "vae", "tokenizer"),
    units=(units.encode_prompt, units.encode_image),
    model_fn=model_fn.predict,
    decoders=(units.decode,),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": InferenceOnly(),
        "input_image": Column("image", "image", multiple=SIDE_MULTIPLE),
        "height": Measured("input_image", "height"),
        "width": Measured("input_image", "width"),
    },
    schedule=SCHEDULE,
    denoiser_config={
        "in_channels": 64,
        "zero_cond_t": False,
        "use_layer3d_rope": False,
    },
    latent_shape=model_fn.latent_shape,
    apply_guidance=model_fn.apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
    padded={"prompt_emb": 1, "prompt_mask": 1},
    # The text encoder is used without its head, and without its visual tower where
    # there are no images.
    unused_parameters={
        "dit": UNUSED_IN_DIT,
        "text_encoder": ("lm_head.*", "model.visual.*"),
    },
    defaults={"height": 1024, "width": 1024, **SAMPLING},
)

# Sizes: VAE_IMAGE_SIZE and CONDITION_IMAGE_SIZE of diffusers'
# QwenImageEditPlusPipeline.
EDIT = replace(
    BASE,
    components=("dit", "text_encoder", "vae", "processor"),
    units=(
        units.resize_edit_image,
        units.encode_edit_prompt,
        units.encode_edit_images,
        units.encode_image,
    ),
    model_fn=model_fn.predict_edit,
    latent_shape=model_fn.latent_shape_edit,
    inputs={
        **BASE.inputs,
        "edit_image": Column("edit_image", "image"),
        "edit_pixels": Constant(1024 * 1024, toy=64 * 64, check=at_least(LEAST_PIXELS)),
    },
    unused_parameters={"dit": UNUSED_IN_DIT, "text_encoder": ("lm_head.*",)},
    defaults=SAMPLING,
)
EDIT_SEVERAL = replace(
    EDIT,
    units=(
        units.resize_edit_images,
        units.encode_numbered_prompt,
        units.encode_edit_images,
        units.encode_image,
    ),
    inputs={
        **EDIT.inputs,
        "edit_image": Column("edit_image", "images"),
        "edit_text_pixels": Constant(
            384 * 384, toy=64 * 64, check=at_least(LEAST_PIXELS)
        ),
    },
)

EDIT_2511 = replace(
    EDIT_SEVERAL, denoiser_config={**BASE.denoiser_config, "zero_cond_t": True}
)

CONTROLNET = replace(
    BASE,
    components=(*BASE.components, "blockwise_controlnet"),
    units=(*BASE.units, control.encode_control_image),
    model_fn=control.predict_controlled,
    inputs={
        **BASE.inputs,
        "blockwise_controlnet_image": Column(
            "blockwise_controlnet_image",
            "image",
            multiple=SIDE_MULTIPLE,
            of="input_image",
        ),
    },
)

CONTROLNET_INPAINT = replace(
    CONTROLNET,
    units=(*BASE.units, control.encode_inpaint_image),
    inputs={
        **CONTROLNET.inputs,
        "blockwise_controlnet_inpaint_mask": Column(
            "blockwise_controlnet_inpaint_mask",
            "image",
            mode="L",
            multiple=SIDE_MULTIPLE,
            of="blockwise_controlnet_image",
        ),
    },
)

IN_CONTEXT = replace(
    BASE,
    units=(*BASE.units, control.encode_context_image),
    model_fn=control.predict_in_context,
    inputs={
        **BASE.inputs,
        "context_image": Column(
            "context_image", "image", multiple=SIDE_MULTIPLE, of="input_image"
        ),
    },
)

ELIGEN = replace(
    BASE,
    units=(*BASE.units, entities.encode_entity_prompts, entities.find_entity_tokens),
    model_fn=entities.predict_entities,
    inputs={
        **BASE.inputs,
        "eligen_entity_prompts": Column("eligen_entity_prompts", "texts"),
        "eligen_entity_masks": Column(
            "eligen_entity_masks",
            "images",
            mode="L",
            multiple=SIDE_MULTIPLE,
            of="input_image",
            entries=EntryCount("eligen_entity_prompts"),
        ),
    },
    padded={**BASE.padded, "entity_emb": 1, "entity_emb_mask": 1},
)

INPAINT = replace(
    BASE,
    units=(units.encode_prompt, inpaint.encode_inpainted),
    constrain_latents=inpaint.keep_outside,
    inputs={
        **BASE.inputs,
        "inpaint_mask": Column(
            "inpaint_mask", "image", mode="L", multiple=SIDE_MULTIPLE, of="input_image"
        ),
    },
)

# QwenImageLayeredPipeline of diffusers: no norms are restored, and the shift follows
# from the tokens of one layer. That it is applied linearly is inferred from its formula,
# and not read in a published scheduler_config.json.
LAYERED = replace(
    BASE,
    units=(
        units.encode_prompt,
        layers.encode_layers,
        layers.encode_layer_input,
        layers.encode_layer_context,
    ),
    model_fn=layers.predict_layers,
    decoders=(layers.decode_layers,),
    inputs={
        **BASE.inputs,
        # The whole image, then its layers.
        "input_image": Column(
            "image",
            "images",
            mode="RGBA",
            multiple=SIDE_MULTIPLE,
            entries=EntryCount("layer_num", more=1),
            same_size=True,
        ),
        "layer_input_image": Column(
            "layer_input_image", "image", mode="RGBA", multiple=SIDE_MULTIPLE
        ),
        "layer_num": Column("layer_num", "integer", check=at_least(0)),
        "context_image": Column(
            "context_image", "image", multiple=SIDE_MULTIPLE, optional=True
        ),
    },
    schedule=replace(SCHEDULE, unshifted_tokens=256),
    denoiser_config={**BASE.denoiser_config, "use_layer3d_rope": True},
    latent_shape=layers.latent_shape_layers,
    apply_guidance=functional.apply_guidance,
    defaults={"height": 640, "width": 640, "layer_num": 4, **SAMPLING},
)

PIPELINES = {
    "base": BASE,
    "edit": EDIT,
    "edit-2509": EDIT_SEVERAL,
    "edit-2511": EDIT_2511,
    "blockwise-controlnet": CONTROLNET,
    "blockwise-controlnet-inpaint": CONTROLNET_INPAINT,
    "in-context-control": IN_CONTEXT,
    "layered": LAYERED,
    "eligen": ELIGEN,
    "inpaint": INPAINT,
}
