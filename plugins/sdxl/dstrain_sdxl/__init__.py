"""The record by which Stable Diffusion XL is found; importing it imports no torch."""

from dstrain.plugin import ModelFamily, Option

# What kohya's scripts train: the linear layers of the attention blocks.
UNET_LORA_TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    *("attentions.*.proj_in", "attentions.*.proj_out"),
)
CLIP_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")

BASE = "stabilityai/stable-diffusion-xl-base-1.0"
NOOB_V = "Laxhar/noobai-XL-Vpred-1.0"
INPAINT = "diffusers/stable-diffusion-xl-1.0-inpainting-0.1"
ENCODERS = ("text_encoder", "text_encoder_2")
TOKENIZERS = ("tokenizer", "tokenizer_2")
FILES = {
    "unet": "unet/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    **{one: f"{one}/model.safetensors" for one in ENCODERS},
}

MODEL = ModelFamily(
    api=2,
    name="sdxl",
    pipelines="dstrain_sdxl.pipeline:PIPELINES",
    components="dstrain_sdxl.components:COMPONENTS",
    toy="dstrain_sdxl.components:write_toy",
    recipes="dstrain_sdxl:recipes",
    variants=("base", "v", "inpaint"),
    default_trainable="unet",
    lora_targets={
        "unet": UNET_LORA_TARGETS,
        **dict.fromkeys(ENCODERS, CLIP_LORA_TARGETS),
    },
    lora_prefixes={name: name for name in ("unet", *ENCODERS)},
    model_ids={
        "v": (NOOB_V, "*/*[vV]pred*", "*/*[vV]-[pP]red*"),
        "base": (BASE, "[!./]*/?llustrious*", "[!./]*/?ony-*", "*/?nimagine-*"),
        "inpaint": (INPAINT, "*/*sdxl*inpaint*"),
    },
    model_files=dict.fromkeys((BASE, NOOB_V, INPAINT), FILES),
    pipeline_classes=(
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
    ),
    default_ids={name: f"{BASE}:{name}/" for name in TOKENIZERS},
    options=(
        *(
            Option(
                f"{name}_path",
                f"Folder of {name}. Defaults to that of stable-diffusion-xl-base-1.0.",
                name,
            )
            for name in TOKENIZERS
        ),
        Option(
            "clip_skip",
            "Layer of both text encoders that is used, 2 to 12, counted from the last. Defaults to 2, as trained.",
        ),
        Option(
            "align_to_opensource_format",
            "Save the U-Net's LoRA with kohya's key names, instead of diffusers'.",
            saves="kohya",
        ),
    ),
)
