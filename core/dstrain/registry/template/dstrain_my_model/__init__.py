"""Add the family my_model to dstrain. Importing this record imports no torch."""

from dstrain.plugin import ModelFamily

MODEL = ModelFamily(
    api=2,
    name="my_model",
    pipelines="dstrain_my_model.pipeline:PIPELINES",
    components="dstrain_my_model.components:COMPONENTS",
    toy="dstrain_my_model.toy:write",
    variants=("base",),
    default_trainable="dit",
    lora_targets={
        "dit": ("to_q", "to_k", "to_v", "to_out"),
        "text_encoder": ("layer",),
    },
    lora_prefixes={"dit": "transformer", "text_encoder": "text_encoder"},
    # What --model_id means; other models in the layout of diffusers need no entry.
    model_ids={"base": ("my-model/my-model",)},
    model_files={
        "my-model/my-model": {
            "dit": "transformer/*.safetensors",
            "text_encoder": "text_encoder/*.safetensors",
            "vae": "vae/*.safetensors",
        }
    },
)
