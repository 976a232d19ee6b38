"""Qwen-Image for dstrain: the record by which the family is found; importing it imports no torch."""

from types import MappingProxyType

from dstrain.record import ModelRecord, Option

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

MODEL = ModelRecord(
    name="qwen_image",
    wiring="dstrain_qwen_image.pipeline:build",
    components="dstrain_qwen_image.components:COMPONENTS",
    toy="dstrain_qwen_image.toy:write",
    variants=("base",),
    default_trainable="dit",
    lora_targets=MappingProxyType({"dit": DIT_LORA_TARGETS, "text_encoder": ("q_proj", "k_proj", "v_proj", "o_proj")}),
    lora_prefixes=MappingProxyType({"dit": "transformer", "text_encoder": "text_encoder"}),
    inference=MappingProxyType(
        {"height": 1024, "width": 1024, "num_inference_steps": 50, "guidance_scale": 4.0, "negative_prompt": " "}
    ),
    default_ids=MappingProxyType({"tokenizer": "Qwen/Qwen-Image:tokenizer/"}),
    options=(Option("tokenizer_path", "Folder of the tokenizer; by default that of Qwen/Qwen-Image.", "tokenizer"),),
)
