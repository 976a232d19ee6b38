"""FLUX.2 for dstrain: the record by which the family is found; importing it imports no
torch.
"""

from dstrain.plugin import ModelFamily, Option

# Those of DiffSynth-Studio's scripts, which name each single block's `attn.to_out`.
DIT_LORA_TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "linear_in",
    "linear_out",
    "to_qkv_mlp_proj",
    "single_transformer_blocks.*.attn.to_out",
)

OWNER = "black-forest-labs"
DEV = f"{OWNER}/FLUX.2-dev"
KLEIN_4B = f"{OWNER}/FLUX.2-klein-4B"
KLEIN_9B = f"{OWNER}/FLUX.2-klein-9B"
BASE_4B = f"{OWNER}/FLUX.2-klein-base-4B"
BASE_9B = f"{OWNER}/FLUX.2-klein-base-9B"
TRANSFORMER = "transformer/*.safetensors"
OTHERS = {
    "text_encoder": "text_encoder/*.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
}
WITH_OWN = (DEV, KLEIN_4B, KLEIN_9B)
# The text encoder and the VAE of a base model are those of the distilled one: they are
# downloaded once.
MODEL_FILES = {one: {"dit": TRANSFORMER, **OTHERS} for one in WITH_OWN}
MODEL_FILES |= {
    base: {
        "dit": TRANSFORMER,
        **{name: f"{klein}:{pattern}" for name, pattern in OTHERS.items()},
    }
    for base, klein in ((BASE_4B, KLEIN_4B), (BASE_9B, KLEIN_9B))
}

MODEL = ModelFamily(
    api=2,
    name="flux2",
    pipelines="dstrain_flux2.pipeline:PIPELINES",
    components="dstrain_flux2.components:COMPONENTS",
    toy="dstrain_flux2.toy:write",
    variants=("dev", "klein", "klein-base"),
    default_trainable="dit",
    lora_targets={
        "dit": DIT_LORA_TARGETS,
        "text_encoder": ("q_proj", "k_proj", "v_proj", "o_proj"),
    },
    lora_prefixes={"dit": "transformer", "text_encoder": "text_encoder"},
    model_ids={
        "dev": ("*/FLUX.2-dev",),
        "klein": ("*/FLUX.2-klein-4B", "*/FLUX.2-klein-9B"),
        "klein-base": ("*/FLUX.2-klein-base-4B", "*/FLUX.2-klein-base-9B"),
    },
    model_files=MODEL_FILES,
    pipeline_classes=("Flux2Pipeline", "Flux2KleinPipeline"),
    default_ids={"tokenizer": f"{KLEIN_4B}:tokenizer/"},
    options=(
        Option(
            "tokenizer_path",
            "Folder of the tokenizer. Defaults to that of the model, else of FLUX.2-klein-4B.",
            "tokenizer",
        ),
        Option(
            "edit_pixels",
            "Area in pixels that each of several reference images has at most. Defaults to 1048576.",
        ),
        Option(
            "single_edit_pixels",
            "Area in pixels that a reference image has at most if it is the only one. Defaults to 4096576.",
        ),
    ),
)
