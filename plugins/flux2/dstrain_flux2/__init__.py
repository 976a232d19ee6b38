"""FLUX.2 for dstrain: the record by which the family is found, without torch."""

from dstrain.plugin import ModelFamily, Option

# Those of DiffSynth-Studio's scripts, which name the last one's blocks one by one.
DIT_LORA_TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("linear_in", "linear_out", "to_qkv_mlp_proj"),
    "single_transformer_blocks.*.attn.to_out",
)

OWNER = "black-forest-labs"
DEV = f"{OWNER}/FLUX.2-dev"
KLEIN_4B = f"{OWNER}/FLUX.2-klein-4B"
KLEIN_9B = f"{OWNER}/FLUX.2-klein-9B"
BASE_4B = f"{OWNER}/FLUX.2-klein-base-4B"
BASE_9B = f"{OWNER}/FLUX.2-klein-base-9B"
# A base model has the sizes of the distilled one, and its text encoder and VAE.
PUBLISHED = {DEV: DEV, **dict.fromkeys((KLEIN_4B, BASE_4B), KLEIN_4B)}
PUBLISHED |= dict.fromkeys((KLEIN_9B, BASE_9B), KLEIN_9B)
MODEL_FILES = {
    model_id: {
        "dit": "transformer/*.safetensors",
        "text_encoder": f"{encoders}:text_encoder/*.safetensors",
        "vae": f"{encoders}:vae/diffusion_pytorch_model.safetensors",
    }
    for model_id, encoders in PUBLISHED.items()
}

MODEL = ModelFamily(
    api=2,
    name="flux2",
    pipelines="dstrain_flux2.pipeline:PIPELINES",
    components="dstrain_flux2.components:COMPONENTS",
    toy="dstrain_flux2.components:write_toy",
    recipes="dstrain_flux2:recipes",
    variants=("dev", "klein", "klein-base"),
    default_trainable="dit",
    lora_targets={
        "dit": DIT_LORA_TARGETS,
        "text_encoder": ("q_proj", "k_proj", "v_proj", "o_proj"),
    },
    lora_prefixes={"dit": "transformer", "text_encoder": "text_encoder"},
    model_ids={
        "dev": ("*/FLUX.2-dev",),
        "klein": ("*/FLUX.2-klein-[49]B",),
        "klein-base": ("*/FLUX.2-klein-base-[49]B",),
    },
    model_files=MODEL_FILES,
    pipeline_classes=("Flux2Pipeline", "Flux2KleinPipeline"),
    unsupported_models={"Template": ("DiffSynth-Studio/Template-*", "template_*")},
    options=(
        Option(
            "tokenizer_path",
            "Folder of the tokenizer. Defaults to the model's own.",
            "tokenizer",
        ),
        Option("edit_pixels", "Most pixels of each of several edit images (1048576)."),
        Option("single_edit_pixels", "Most pixels of a single edit image (4096576)."),
    ),
)
