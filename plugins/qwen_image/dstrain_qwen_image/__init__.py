"""Qwen-Image for dstrain: the record by which the family is found; importing it imports
no torch.
"""

from dstrain.plugin import ModelFamily, Option

DIT_LORA_TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_out.0",
    "to_add_out",
    "img_mlp.net.2",
    "img_mod.1",
    "txt_mlp.net.2",
    "txt_mod.1",
)

# Models whose text encoder, VAE and (but for zero_cond_t of Edit-2511) transformer are
# alike but for the weights.
IDS = (
    "Qwen/Qwen-Image",
    "Qwen/Qwen-Image-2512",
    "Qwen/Qwen-Image-Edit",
    "Qwen/Qwen-Image-Edit-2509",
    "Qwen/Qwen-Image-Edit-2511",
    "FireRedTeam/FireRed-Image-Edit-1.0",
    "FireRedTeam/FireRed-Image-Edit-1.1",
)
TRANSFORMER = "transformer/diffusion_pytorch_model*.safetensors"
TRANSFORMERS = {
    **dict.fromkeys(IDS, TRANSFORMER),
    # Its repository has the transformer alone.
    "DiffSynth-Studio/Qwen-Image-Distill-Full": "diffusion_pytorch_model*.safetensors",
}
# All of them have the text encoder and the VAE of the first: they are downloaded once.
SHARED = {
    "text_encoder": "Qwen/Qwen-Image:text_encoder/model*.safetensors",
    "vae": "Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors",
}
CONTROLNETS = "DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-"
LAYERED = "Qwen/Qwen-Image-Layered"
LAYERED_IDS = (LAYERED, "DiffSynth-Studio/Qwen-Image-Layered-Control")
MODELS = {
    **{
        model_id: {"dit": pattern, **SHARED}
        for model_id, pattern in TRANSFORMERS.items()
    },
    **{
        CONTROLNETS + kind: {
            "dit": f"Qwen/Qwen-Image:{TRANSFORMER}",
            **SHARED,
            "blockwise_controlnet": "model.safetensors",
        }
        for kind in ("Canny", "Depth", "Inpaint")
    },
    **{
        model_id: {
            "dit": TRANSFORMER,
            **SHARED,
            "vae": f"{LAYERED}:vae/diffusion_pytorch_model.safetensors",
        }
        for model_id in LAYERED_IDS
    },
}

MODEL = ModelFamily(
    api=2,
    name="qwen_image",
    pipelines="dstrain_qwen_image.pipeline:PIPELINES",
    components="dstrain_qwen_image.components:COMPONENTS",
    toy="dstrain_qwen_image.toy:write",
    recipes="dstrain_qwen_image:recipes",
    variants=(
        "base",
        "edit",
        "edit-2509",
        "edit-2511",
        "blockwise-controlnet",
        "blockwise-controlnet-inpaint",
        "in-context-control",
        "layered",
        "eligen",
        "inpaint",
    ),
    model_ids={
        "base": ("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
        "edit": ("Qwen/Qwen-Image-Edit",),
        "edit-2509": (
            "Qwen/Qwen-Image-Edit-2509",
            "FireRedTeam/FireRed-Image-Edit-1.0",
            "FireRedTeam/FireRed-Image-Edit-1.1",
        ),
        "edit-2511": ("Qwen/Qwen-Image-Edit-2511",),
        # What is given beside the first model's own files and columns tells these.
        "blockwise-controlnet": (
            "Qwen/Qwen-Image",
            f"{CONTROLNETS}Canny",
            f"{CONTROLNETS}Depth",
        ),
        "blockwise-controlnet-inpaint": ("Qwen/Qwen-Image", f"{CONTROLNETS}Inpaint"),
        "in-context-control": ("Qwen/Qwen-Image",),
        "eligen": ("Qwen/Qwen-Image",),
        "inpaint": ("Qwen/Qwen-Image",),
        "layered": LAYERED_IDS,
    },
    model_files=MODELS,
    pipeline_classes=(
        "QwenImagePipeline",
        "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline",
        "QwenImageLayeredPipeline",
    ),
    default_trainable="dit",
    lora_targets={
        "dit": DIT_LORA_TARGETS,
        "text_encoder": ("q_proj", "k_proj", "v_proj", "o_proj"),
    },
    lora_prefixes={"dit": "transformer", "text_encoder": "text_encoder"},
    default_ids={
        "tokenizer": "Qwen/Qwen-Image:tokenizer/",
        "processor": "Qwen/Qwen-Image-Edit:processor/",
    },
    options=(
        Option(
            "tokenizer_path",
            "Folder of the tokenizer. Defaults to that of Qwen/Qwen-Image.",
            "tokenizer",
        ),
        Option(
            "processor_path",
            "Folder of the processor. Defaults to that of Qwen/Qwen-Image-Edit.",
            "processor",
        ),
        Option("edit_pixels", "Area in pixels that images to edit are resized to."),
        Option(
            "edit_text_pixels",
            "Area in pixels that images to edit are resized to for the text encoder.",
        ),
        Option(
            "zero_cond_t",
            "Keep images to edit at timestep 0 (Edit-2511), if the denoiser's config.json does not say so.",
            "dit",
            "zero_cond_t",
            ("edit", "edit-2509", "edit-2511"),
        ),
    ),
)
