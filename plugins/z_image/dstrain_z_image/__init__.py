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
IDS = (f"{OWNER}/Z-Image",)

MODEL = ModelFamily(
    api=2,
    name="z_image",
    pipelines="dstrain_z_image.pipeline:PIPELINES",
    components="dstrain_z_image.components:COMPONENTS",
    toy="dstrain_z_image.toy:write",
    variants=("base",),
    default_trainable="dit",
    lora_targets={
        "dit": ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"),
        "text_encoder": ("q_proj", "k_proj", "v_proj", "o_proj"),
    },
    lora_prefixes={"dit": "transformer", "text_encoder": "text_encoder"},
    model_ids={"base": (f"{OWNER}/Z-Image",)},
    model_files={name: {"dit": TRANSFORMER, **SHARED} for name in IDS},
    pipeline_classes=("ZImagePipeline",),
    default_ids={"tokenizer": f"{TURBO}:tokenizer/"},
    options=(
        Option(
            "tokenizer_path",
            f"Folder of the tokenizer. Defaults to that of {TURBO}.",
            "tokenizer",
        ),
    ),
)
