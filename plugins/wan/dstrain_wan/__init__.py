"""Wan 2.1 and 2.2 for dstrain: the record by which the family is found; importing it
imports no torch.
"""

from collections.abc import Mapping

from dstrain.plugin import ModelFamily, Option

DOWNSCALE = 8
"""Pixels of a latent along height and width, in the VAE of Wan 2.1."""
DIT_LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")

DIT = "diffusion_pytorch_model*.safetensors"
EXPERTS = {
    "dit": "high_noise_model/diffusion_pytorch_model*.safetensors",
    "dit2": "low_noise_model/diffusion_pytorch_model*.safetensors",
}
TEXT_ENCODER = "models_t5_umt5-xxl-enc-bf16.pth"
IMAGE_ENCODER = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
VAE = "Wan2.1_VAE.pth"

# The original repositories.
TEXT_TO_VIDEO = {"dit": DIT, "text_encoder": TEXT_ENCODER, "vae": VAE}
IMAGE_TO_VIDEO = {**TEXT_TO_VIDEO, "image_encoder": IMAGE_ENCODER}
TWO_EXPERTS = {**EXPERTS, "text_encoder": TEXT_ENCODER, "vae": VAE}
# VACE is in the same files as the denoiser, each of the two in those of its expert.
VACE = {**TEXT_TO_VIDEO, "vace": DIT}
TWO_VACES = {**TWO_EXPERTS, "vace": EXPERTS["dit"], "vace2": EXPERTS["dit2"]}
ORIGINALS = {
    "Wan-AI/Wan2.1-T2V-1.3B": TEXT_TO_VIDEO,
    "Wan-AI/Wan2.1-T2V-14B": TEXT_TO_VIDEO,
    "Wan-AI/Wan2.1-I2V-14B-480P": IMAGE_TO_VIDEO,
    "Wan-AI/Wan2.1-I2V-14B-720P": IMAGE_TO_VIDEO,
    "Wan-AI/Wan2.1-FLF2V-14B-720P": IMAGE_TO_VIDEO,
    "Wan-AI/Wan2.1-VACE-1.3B": VACE,
    "Wan-AI/Wan2.1-VACE-14B": VACE,
    "Wan-AI/Wan2.2-T2V-A14B": TWO_EXPERTS,
    "Wan-AI/Wan2.2-I2V-A14B": TWO_EXPERTS,
    "Wan-AI/Wan2.2-TI2V-5B": {**TEXT_TO_VIDEO, "vae": "Wan2.2_VAE.pth"},
}
# Published in the layout of the original ones alone.
SPEED_CONTROL = "DiffSynth-Studio/Wan2.1-1.3b-speedcontrol-v1"
KREA = "krea/krea-realtime-video"
OTHERS = {
    KREA: {
        "dit": "krea-realtime-video-14b.safetensors",
        "text_encoder": f"Wan-AI/Wan2.1-T2V-14B:{TEXT_ENCODER}",
        "vae": f"Wan-AI/Wan2.1-T2V-14B:{VAE}",
    },
    "iic/VACE-Wan2.1-1.3B-Preview": VACE,
    "PAI/Wan2.2-VACE-Fun-A14B": TWO_VACES,
    **{
        f"PAI/Wan2.1-Fun-{name}-{kind}": IMAGE_TO_VIDEO
        for name in ("1.3B", "14B", "V1.1-1.3B", "V1.1-14B")
        for kind in ("InP", "Control")
    },
    "PAI/Wan2.2-Fun-A14B-InP": TWO_EXPERTS,
    "PAI/Wan2.2-Fun-A14B-Control": TWO_EXPERTS,
    **{
        f"PAI/Wan2.1-Fun-V1.1-{size}-Control-Camera": IMAGE_TO_VIDEO
        for size in ("1.3B", "14B")
    },
    "PAI/Wan2.2-Fun-A14B-Control-Camera": TWO_EXPERTS,
    SPEED_CONTROL: {
        **{
            name: f"Wan-AI/Wan2.1-T2V-1.3B:{files}"
            for name, files in TEXT_TO_VIDEO.items()
        },
        "motion_controller": "model.safetensors",
    },
}
# Those in the layout of diffusers.
DIFFUSERS = {
    "dit": "transformer/diffusion_pytorch_model*.safetensors",
    "dit2": "transformer_2/diffusion_pytorch_model*.safetensors",
    "vace": "transformer/diffusion_pytorch_model*.safetensors",
    "text_encoder": "text_encoder/model*.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "image_encoder": "image_encoder/model.safetensors",
}


def in_diffusers_layout(files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the same components in the layout of diffusers."""
    return {name: DIFFUSERS[name] for name in files}


def diffusers_id(model_id: str) -> str:
    """Return the model id of an original repository's copy in the layout of diffusers."""
    is_later = any(name in model_id for name in ("FLF2V", "VACE"))
    return f"{model_id}-{'diffusers' if is_later else 'Diffusers'}"


MODEL_FILES = {
    **ORIGINALS,
    **OTHERS,
    **{
        diffusers_id(model_id): in_diffusers_layout(files)
        for model_id, files in ORIGINALS.items()
    },
}

MODEL = ModelFamily(
    api=2,
    name="wan",
    pipelines="dstrain_wan.pipeline:PIPELINES",
    components="dstrain_wan.components:COMPONENTS",
    toy="dstrain_wan.toy:write",
    recipes="dstrain_wan:recipes",
    variants=(
        "t2v",
        "i2v",
        "flf2v",
        "t2v-a14b",
        "i2v-a14b",
        "ti2v-5b",
        "fun-control",
        "fun-control-ref",
        "fun-control-a14b",
        "fun-camera",
        "fun-camera-a14b",
        "speedcontrol",
        "vace",
        "vace-a14b",
    ),
    model_ids={
        "t2v": ("Wan-AI/Wan2.1-T2V-*", KREA),
        "i2v": ("Wan-AI/Wan2.1-I2V-*", "*/Wan2.1-Fun-*-InP"),
        "flf2v": ("Wan-AI/Wan2.1-FLF2V-*",),
        "t2v-a14b": ("Wan-AI/Wan2.2-T2V-A14B*",),
        "i2v-a14b": ("Wan-AI/Wan2.2-I2V-A14B*", "*/Wan2.2-Fun-A14B-InP"),
        "ti2v-5b": ("Wan-AI/Wan2.2-TI2V-5B*",),
        "fun-control": ("*/Wan2.1-Fun-1.3B-Control", "*/Wan2.1-Fun-14B-Control"),
        "fun-control-ref": ("*/Wan2.1-Fun-V1.1-*-Control",),
        "fun-control-a14b": ("*/Wan2.2-Fun-A14B-Control",),
        "fun-camera": ("*/Wan2.1-Fun-V1.1-*-Control-Camera",),
        "fun-camera-a14b": ("*/Wan2.2-Fun-A14B-Control-Camera",),
        # Its columns, or the file of the controller, tell it from text to video.
        "speedcontrol": ("Wan-AI/Wan2.1-T2V-1.3B*", SPEED_CONTROL),
        "vace": ("Wan-AI/Wan2.1-VACE-*", "iic/VACE-Wan2.1-*"),
        "vace-a14b": ("*/Wan2.2-VACE-Fun-A14B",),
    },
    model_files=MODEL_FILES,
    pipeline_classes=("WanPipeline", "WanImageToVideoPipeline"),
    other_models={"LongCat-Video": {"num_attention_heads": 32, "num_layers": 48}},
    unsupported_models={
        "Wan2.2-Animate-2": ("Wan-AI/Wan2.2-Animate-2-*", "animate2_*"),
        "Wan2.2-Animate": ("Wan-AI/Wan2.2-Animate-*", "animate_*"),
        "Wan2.2-S2V": ("Wan-AI/Wan2.2-S2V-*", "input_audio", "s2v_pose_video"),
        "LongCat-Video": ("meituan-longcat/LongCat-Video*", "longcat_video"),
        "Wan-Dancer": ("Wan-AI/Wan-Dancer-*", "wantodance_*"),
        "Video-As-Prompt": ("ByteDance/Video-As-Prompt-Wan*", "vap_*"),
    },
    default_trainable="dit",
    lora_targets={
        "dit": DIT_LORA_TARGETS,
        "dit2": DIT_LORA_TARGETS,
        "vace": DIT_LORA_TARGETS,
        "vace2": DIT_LORA_TARGETS,
        "text_encoder": tuple(f"SelfAttention.{name}" for name in "qkvo"),
    },
    # Names of the same layers in the published code, which other trainers' commands
    # use.
    lora_aliases={
        "q": ("to_q",),
        "k": ("to_k",),
        "v": ("to_v",),
        "o": ("to_out.0",),
        "ffn.0": ("ffn.net.0.proj",),
        "ffn.2": ("ffn.net.2",),
    },
    # diffusers loads the file of either expert under the name "transformer":
    # load_into_transformer_2 says which.
    lora_prefixes={
        "dit": "transformer",
        "dit2": "transformer",
        "vace": "transformer",
        "vace2": "transformer",
        "text_encoder": "text_encoder",
    },
    # As DiffSynth-Studio does: without it, 81 frames at 480 x 832 need more memory than any
    # card has.
    gradient_checkpointing=True,
    default_ids={"tokenizer": "Wan-AI/Wan2.1-T2V-1.3B:google/umt5-xxl/"},
    options=(
        Option(
            "tokenizer_path",
            "Folder of umT5's tokenizer. Defaults to that of Wan2.1-T2V-1.3B.",
            "tokenizer",
        ),
    ),
)
