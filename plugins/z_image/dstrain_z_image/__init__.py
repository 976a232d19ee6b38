"""Z-Image for dstrain: the record of the family; importing it imports no torch."""

from dstrain.plugin import ModelFamily, Option

BASE, TURBO = "Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo"
OMNI = "Tongyi-MAI/Z-Image-Omni-Base"
UNION = "Z-Image-Turbo-Fun-Controlnet-Union-2.1"
CONTROLNETS = (f"PAI/{UNION}", f"alibaba-pai/{UNION}")
# The text encoder and the VAE of all are those of Turbo: they are downloaded once.
SHARED = {
    "text_encoder": f"{TURBO}:text_encoder/*.safetensors",
    "vae": f"{TURBO}:vae/diffusion_pytorch_model.safetensors",
}
OWN = {"dit": "transformer/*.safetensors", **SHARED}
CONTROL = {
    "dit": f"{TURBO}:{OWN['dit']}",
    "controlnet": f"{UNION}-8steps.safetensors",
    **SHARED,
}
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")
CLASSES = ("ZImagePipeline", "ZImageOmniPipeline", "ZImageControlNetPipeline")
ENCODER_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")

MODEL = ModelFamily(
    api=2,
    name="z_image",
    pipelines="dstrain_z_image.pipeline:PIPELINES",
    components="dstrain_z_image.components:COMPONENTS",
    toy="dstrain_z_image.components:write_toy",
    recipes="dstrain_z_image:recipes",
    variants=("base", "turbo", "omni", "controlnet-union"),
    default_trainable="dit",
    lora_targets={"dit": LAYERS, "text_encoder": ENCODER_LAYERS},
    lora_prefixes={"dit": "transformer", "text_encoder": "text_encoder"},
    model_ids={
        "base": (BASE,),
        "turbo": (TURBO,),
        "omni": (OMNI,),
        "controlnet-union": CONTROLNETS,
    },
    model_files={
        BASE: OWN,
        TURBO: OWN,
        OMNI: {**OWN, "image_encoder": "siglip/model.safetensors"},
        **dict.fromkeys(CONTROLNETS, CONTROL),
    },
    pipeline_classes=CLASSES,
    unsupported_models={"Z-Image-i2L": ("DiffSynth-Studio/Z*i2L*", "template_inputs")},
    default_ids={"tokenizer": f"{TURBO}:tokenizer/"},
    options=(
        Option("tokenizer_path", "Its folder. Defaults to Turbo's.", "tokenizer"),
        Option(
            "enable_npu_patch", "For NPUs; has no effect.", idle="it is for Ascend NPUs"
        ),
    ),
)
