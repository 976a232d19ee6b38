"""FLUX.1 for dstrain: the record by which the family is found; importing it imports no
torch.
"""

from dstrain.plugin import ModelFamily, Option

JOINT, SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"

DIT_LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_out.0",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "proj_mlp",
    f"{SINGLE}.proj_out",
)

# Those of both kinds of block: some ControlNets have no single ones.
CONTROLNET_LORA_TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v")

# DiffSynth-Studio's names are those of FLUX's original layers, some of which hold
# several of diffusers' in one.
LORA_ALIASES = {
    "a_to_qkv": tuple(f"{JOINT}.attn.{name}" for name in ("to_q", "to_k", "to_v")),
    "b_to_qkv": tuple(
        f"{JOINT}.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj")
    ),
    "ff_a.0": (f"{JOINT}.ff.net.0.proj",),
    "ff_a.2": (f"{JOINT}.ff.net.2",),
    "ff_b.0": (f"{JOINT}.ff_context.net.0.proj",),
    "ff_b.2": (f"{JOINT}.ff_context.net.2",),
    "a_to_out": (f"{JOINT}.attn.to_out.0",),
    "b_to_out": (f"{JOINT}.attn.to_add_out",),
    "proj_out": (f"{SINGLE}.proj_out",),
    "norm.linear": (f"{SINGLE}.norm.linear",),
    "norm1_a.linear": (f"{JOINT}.norm1.linear",),
    "norm1_b.linear": (f"{JOINT}.norm1_context.linear",),
    "to_qkv_mlp": tuple(
        f"{SINGLE}.{name}"
        for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ),
}

OWNER = "black-forest-labs"
DEV = f"{OWNER}/FLUX.1-dev"
TRANSFORMERS = {
    DEV: "flux1-dev.safetensors",
    f"{OWNER}/FLUX.1-Krea-dev": "flux1-krea-dev.safetensors",
    f"{OWNER}/FLUX.1-Kontext-dev": "flux1-kontext-dev.safetensors",
    f"{OWNER}/FLUX.1-Fill-dev": "flux1-fill-dev.safetensors",
    f"{OWNER}/FLUX.1-schnell": "flux1-schnell.safetensors",
}
OTHERS = {
    "text_encoder_1": "text_encoder/model.safetensors",
    "text_encoder_2": "text_encoder_2/*.safetensors",
    "vae": "ae.safetensors",
}
# All of them have the text encoders and the VAE of the first: they are downloaded once.
# But schnell's own are free, while the first wants its terms to be accepted; and the
# published commands for Fill name its own.
SHARED = {name: f"{DEV}:{pattern}" for name, pattern in OTHERS.items()}
WITH_OWN = (f"{OWNER}/FLUX.1-schnell", f"{OWNER}/FLUX.1-Fill-dev")
MODEL_FILES = {
    model_id: {"dit": pattern, **(OTHERS if model_id in WITH_OWN else SHARED)}
    for model_id, pattern in TRANSFORMERS.items()
}

# Networks beside the denoiser and the encoders of FLUX.1-dev.
WITH_DEV = {"dit": f"{DEV}:{TRANSFORMERS[DEV]}", **SHARED}
CONTROLNETS = {
    "controlnet": "jasperai/Flux.1-dev-Controlnet-Upscaler",
    "controlnet-union": "InstantX/FLUX.1-dev-Controlnet-Union-alpha",
    "controlnet-inpaint": "alimama-creative/FLUX.1-dev-Controlnet-Inpainting-Beta",
}
MODEL_FILES |= {
    model_id: {"controlnet": "diffusion_pytorch_model.safetensors", **WITH_DEV}
    for model_id in CONTROLNETS.values()
}

REDUX = f"{OWNER}/FLUX.1-Redux-dev"
MODEL_FILES |= {
    REDUX: {
        "image_encoder": "image_encoder/model.safetensors",
        "redux": "image_embedder/diffusion_pytorch_model.safetensors",
        **WITH_DEV,
    }
}

SIGLIP = "google/siglip-so400m-patch14-384"
IP_ADAPTER = "InstantX/FLUX.1-dev-IP-Adapter"
MODEL_FILES |= {
    IP_ADAPTER: {
        "ipadapter": "ip-adapter.bin",
        "image_encoder": f"{SIGLIP}:model.safetensors",
        **WITH_DEV,
    }
}

MODEL = ModelFamily(
    api=2,
    name="flux",
    pipelines="dstrain_flux.pipeline:PIPELINES",
    components="dstrain_flux.components:COMPONENTS",
    toy="dstrain_flux.toy:write",
    recipes="dstrain_flux:recipes",
    variants=(
        "dev",
        "kontext",
        "fill",
        *CONTROLNETS,
        "redux",
        "ip-adapter",
        "eligen",
        "schnell",
    ),
    default_trainable="dit",
    lora_targets={
        "dit": DIT_LORA_TARGETS,
        "controlnet": CONTROLNET_LORA_TARGETS,
        "text_encoder_1": ("q_proj", "k_proj", "v_proj", "out_proj"),
        "text_encoder_2": ("q", "k", "v", "o"),
    },
    lora_prefixes={
        "dit": "transformer",
        "controlnet": "controlnet",
        "text_encoder_1": "text_encoder",
        "text_encoder_2": "text_encoder_2",
    },
    lora_aliases=LORA_ALIASES,
    model_ids={
        "dev": ("*/FLUX.1-dev", "*/FLUX.1-Krea-dev"),
        "schnell": ("*/FLUX.1-schnell",),
        "kontext": ("*/FLUX.1-Kontext-dev",),
        "fill": ("*/FLUX.1-Fill-dev",),
        **{variant: (model_id,) for variant, model_id in CONTROLNETS.items()},
        "redux": (REDUX,),
        "ip-adapter": (IP_ADAPTER,),
        "eligen": ("*/FLUX.1-dev",),
    },
    model_files=MODEL_FILES,
    pipeline_classes=(
        "FluxPipeline",
        "FluxKontextPipeline",
        "FluxFillPipeline",
        "FluxControlNetPipeline",
    ),
    other_models={
        "FLUX.1-Canny-dev or FLUX.1-Depth-dev": {"in_channels": 128},
        "Flex.2-preview": {"in_channels": 196},
    },
    unsupported_models={
        "Flex.2-preview": ("ostris/Flex.2-preview", "flex_*"),
        "FLUX.1-Canny-dev": (f"{OWNER}/FLUX.1-Canny-dev*",),
        "FLUX.1-Depth-dev": (f"{OWNER}/FLUX.1-Depth-dev*",),
        "AttriCtrl": ("DiffSynth-Studio/AttriCtrl-FLUX*", "value_controller_inputs"),
        "InfiniteYou": ("ByteDance/InfiniteYou", "infinityou_*"),
        "Insert Anything": ("insert_anything_*",),
        "LoRA-Encoder": ("DiffSynth-Studio/LoRA-Encoder-FLUX*", "lora_encoder_*"),
        "Nexus-Gen": ("DiffSynth-Studio/Nexus-Gen*", "nexus_gen_*"),
        "Step1X-Edit": ("stepfun-ai/Step1X-Edit*", "step1x_*"),
    },
    default_ids={
        "tokenizer_1": f"{DEV}:tokenizer/",
        "tokenizer_2": f"{DEV}:tokenizer_2/",
    },
    options=(
        Option(
            "tokenizer_1_path",
            "Folder of CLIP's tokenizer. Defaults to that of FLUX.1-dev.",
            "tokenizer_1",
        ),
        Option(
            "tokenizer_2_path",
            "Folder of T5's tokenizer. Defaults to that of FLUX.1-dev.",
            "tokenizer_2",
        ),
        Option(
            "align_to_opensource_format",
            "Save the transformer's LoRA with kohya's key names, which ComfyUI reads, instead of diffusers'.",
            saves="kohya",
        ),
        Option(
            "kontext_pixels",
            "Area in pixels that Kontext's images to edit are resized to. Defaults to 1048576.",
        ),
    ),
)
