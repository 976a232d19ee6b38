"""Z-Image for dstrain: the record by which the family is found; importing it imports no
torch.
"""

from dstrain.plugin import ModelFamily, Option

OWNER = "Tongyi-MAI"
TURBO = f"{OWNER}/Z-Image-Turbo"
TRANSFORMER = "transformer/*.safetensors"
# The text encoder and the VAE are those of Turbo: they are downloaded once.
SHARED = {
    "text_encoder": f"{TURBO}:text_encoder/*.safetensors",
    "vae": f"{TURBO}:vae/diffusion_pytorch_model.safetensors",
}
OMNI = f"{OWNER}/Z-Image-Omni-Base"
IDS = (f"{OWNER}/Z-Image", TURBO)
# The same files on the two hubs; each name is followed by the version, and "-8steps" for
# those distilled together with the denoiser's eight steps.
CONTROLNETS = (
    "PAI/Z-Image-Turbo-Fun-Controlnet-Union-2.1",
    "alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union-2.1",
)
CONTROLNET = "Z-Image-Turbo-Fun-Controlnet-Union-2.1-8steps.safetensors"
MODEL_FILES = {
    **{model_id: {"dit": TRANSFORMER, **SHARED} for model_id in IDS},
    OMNI: {"dit": TRANSFORMER, "image_encoder": "siglip/model.safetensors", **SHARED},
    **{
        model_id: {"dit": f"{TURBO}:{TRANSFORMER}", "controlnet": CONTROLNET, **SHARED}
        for model_id in CONTROLNETS
    },
}
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")

MODEL = ModelFamily(
    api=2,
    name="z_image",
    pipelines="dstrain_z_image.pipeline:PIPELINES",
    components="dstrain_z_image.components:COMPONENTS",
    toy="dstrain_z_image.toy:write",
    variants=("base", "turbo", "omni", "controlnet-union"),
    default_trainable="dit",
    lora_targets={
        "dit": LAYERS,
        "controlnet": LAYERS,
        "text_encoder": ("q_proj", "k_proj", "v_proj", "o_proj"),
    },
    lora_prefixes={
        "dit": "transformer",
        "controlnet": "controlnet",
        "text_encoder": "text_encoder",
    },
    model_ids={
        "base": (f"{OWNER}/Z-Image",),
        "turbo": (TURBO,),
        "omni": (OMNI,),
        "controlnet-union": CONTROLNETS,
    },
    model_files=MODEL_FILES,
    pipeline_classes=(
        "ZImagePipeline",
        "ZImageOmniPipeline",
        "ZImageControlNetPipeline",
    ),
    unsupported_models={
        "Z-Image-i2L": ("DiffSynth-Studio/Z*Image-i2L*", "template_inputs")
    },
    default_ids={"tokenizer": f"{TURBO}:tokenizer/"},
    options=(
        Option(
            "tokenizer_path",
            f"Folder of the tokenizer. Defaults to that of {TURBO}.",
            "tokenizer",
        ),
        Option(
            "edit_pixels",
            "Area in pixels that images to edit have at most. Defaults to 1048576.",
        ),
        Option(
            "enable_npu_patch",
            "Fused operators on Ascend NPUs, in DiffSynth-Studio; has no effect here.",
            idle="it replaces operators on Ascend NPUs, which dstrain has none for",
        ),
    ),
)
