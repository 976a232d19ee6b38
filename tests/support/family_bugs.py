"""Bugs that families have had, or could have, each as an edit of one file of a family,
with the test of the conformance kit that must see it.

`test_r15_planted_family_bugs.py` applies each to a copy of the family. An author writes
plans and fingerprints anew when they change, so that no bug may be left to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

STEPS = "every_step_equals_that_of_the_published_pipeline"
LATENTS = "training_latents_equal_the_published_ones"
SHAPES = "inference_begins_with_latents_shaped_as_those_of_training"
ALONE = "a_sample_has_the_loss_that_it_has_alone"


@dataclass(frozen=True)
class Edit:
    """One edit of a family's package, and the variant whose tests must see it."""

    variant: str
    file: str
    old: str
    """A text that stands once in the file."""
    new: str


@dataclass(frozen=True)
class FamilyBug:
    """A bug in each of the families that it can be in."""

    name: str
    kind: str
    seen_by: str
    """The test of the kit."""
    edits: Mapping[str, Edit]
    """Family -> edit."""


def bug(name: str, kind: str, seen_by: str, **edits: Edit) -> FamilyBug:
    """Return a bug with its edits by family."""
    return FamilyBug(name, kind, seen_by, MappingProxyType(edits))


TOY_WRITER = (
    'write = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))'
)
TOY_OF_THE_CLOCK = f"""import time

_{TOY_WRITER}


def write(folder, variant="", seed=0, sizes=None):
    _write(folder, variant, time.time_ns() % 2**31, sizes)"""

BUGS = (
    bug(
        "the_encoder_forgets_mean_and_std",
        "units",
        LATENTS,
        qwen_image=Edit(
            "base",
            "units.py",
            "normalized: Tensor = (mode - mean) / std",
            "normalized: Tensor = mode",
        ),
        flux=Edit(
            "dev",
            "units.py",
            "    return (mode - vae.config.shift_factor) * vae.config.scaling_factor",
            "    return mode",
        ),
        wan=Edit(
            "t2v", "units.py", "    return (mode - mean) * (1 / std)", "    return mode"
        ),
    ),
    bug(
        "latents_are_drawn_instead_of_their_mode",
        "units",
        LATENTS,
        qwen_image=Edit(
            "base", "units.py", ".latent_dist.mode()", ".latent_dist.sample()"
        ),
        flux=Edit("dev", "units.py", ".latent_dist.mode()", ".latent_dist.sample()"),
        wan=Edit("t2v", "units.py", ".latent_dist.mode()", ".latent_dist.sample()"),
    ),
    bug(
        "pixels_are_in_0_to_1",
        "units",
        LATENTS,
        qwen_image=Edit(
            "base",
            "units.py",
            "images_to_tensor([image]).to(device, dtype)",
            "(images_to_tensor([image]) / 2 + 0.5).to(device, dtype)",
        ),
        flux=Edit(
            "dev",
            "units.py",
            "given = pixels.to(device, dtype)",
            "given = (pixels / 2 + 0.5).to(device, dtype)",
        ),
        wan=Edit(
            "t2v",
            "units.py",
            "encode_frames(to_minus_one_one(input_video.pixels), vae)",
            "encode_frames(to_minus_one_one(input_video.pixels) / 2 + 0.5, vae)",
        ),
    ),
    bug(
        "the_encoder_runs_in_fp32",
        "units",
        "bf16_is_near_fp32",
        qwen_image=Edit(
            "base",
            "units.py",
            "images_to_tensor([image]).to(device, dtype)",
            "images_to_tensor([image]).to(device)",
        ),
        flux=Edit(
            "dev",
            "units.py",
            "given = pixels.to(device, dtype)",
            "given = pixels.to(device)",
        ),
        wan=Edit("t2v", "units.py", ".to(vae.device, vae.dtype)", ".to(vae.device)"),
    ),
    bug(
        "the_text_encoder_is_in_training_mode",
        "units",
        "split_equals_unsplit_bit_for_bit",
        flux=Edit(
            "dev",
            "units.py",
            "text_encoder_1(tokens).pooler_output",
            "text_encoder_1.train()(tokens).pooler_output",
        ),
        wan=Edit(
            "t2v",
            "units.py",
            "    states = text_encoder(tokens",
            "    states = text_encoder.train()(tokens",
        ),
    ),
    bug(
        "another_layer_of_the_encoder_is_read",
        "units",
        STEPS,
        qwen_image=Edit(
            "base",
            "units.py",
            "(**inputs, use_cache=False).last_hidden_state",
            "(**inputs, use_cache=False, output_hidden_states=True).hidden_states[-2]",
        ),
        flux=Edit(
            "dev",
            "units.py",
            "text_encoder_1(tokens).pooler_output",
            "text_encoder_1(tokens).last_hidden_state[:, 0]",
        ),
        wan=Edit(
            "i2v",
            "units.py",
            "(batch, output_hidden_states=True).hidden_states[-2]",
            "(batch, output_hidden_states=True).hidden_states[-1]",
        ),
    ),
    bug(
        "the_prompt_has_other_tokens",
        "units",
        STEPS,
        qwen_image=Edit(
            "base", "units.py", "PREFIX + prompt + SUFFIX", "PREFIX + prompt"
        ),
        flux=Edit("dev", "units.py", "T5_TOKENS = 512", "T5_TOKENS = 256"),
        wan=Edit(
            "t2v",
            "units.py",
            "(tokens.input_ids, tokens.attention_mask)",
            "(tokens.input_ids)",
        ),
    ),
    bug(
        "an_image_to_edit_means_something_else",
        "units",
        STEPS,
        qwen_image=Edit(
            "edit-2509",
            "units.py",
            'NUMBERED_IMAGE = f"Picture {{}}: {IMAGE}"',
            'NUMBERED_IMAGE = f"Image {{}}: {IMAGE}"',
        ),
        flux=Edit(
            "kontext", "model_fn.py", "image_ids(image, i)", "image_ids(image, 0)"
        ),
        wan=Edit(
            "i2v", "units.py", "    mask[:, :, 0] = 1\n", "    mask[:, :, 1:] = 1\n"
        ),
    ),
    bug(
        "the_decoder_forgets_mean_and_std",
        "decoder",
        STEPS,
        qwen_image=Edit(
            "base", "units.py", "(latents / (1 / std) + mean).to", "latents.to"
        ),
        flux=Edit(
            "dev",
            "units.py",
            "latents / vae.config.scaling_factor + vae.config.shift_factor",
            "latents / vae.config.scaling_factor",
        ),
        wan=Edit("t2v", "units.py", "(latents / (1 / std) + mean).to", "latents.to"),
    ),
    bug(
        "the_prediction_has_the_other_sign",
        "model_fn",
        STEPS,
        qwen_image=Edit(
            "base",
            "model_fn.py",
            "        unpack(tokens[:, ",
            "        -unpack(tokens[:, ",
        ),
        flux=Edit(
            "dev",
            "model_fn.py",
            "    return unpack(tokens[:, ",
            "    return -unpack(tokens[:, ",
        ),
        wan=Edit(
            "t2v", "model_fn.py", "    return prediction\n", "    return -prediction\n"
        ),
    ),
    bug(
        "timesteps_are_counted_otherwise",
        "model_fn",
        STEPS,
        qwen_image=Edit(
            "base", "model_fn.py", "time = timestep / 1000", "time = timestep / 999"
        ),
        flux=Edit(
            "dev", "model_fn.py", "time = timestep / 1000", "time = timestep / 999"
        ),
        wan=Edit(
            "t2v",
            "model_fn.py",
            "        timestep=timestep,\n",
            "        timestep=timestep / 1000,\n",
        ),
    ),
    bug(
        "height_and_width_change_places",
        "model_fn",
        STEPS,
        qwen_image=Edit(
            "base",
            "model_fn.py",
            "(1, height // PATCH, width // PATCH)",
            "(1, width // PATCH, height // PATCH)",
        ),
        flux=Edit(
            "dev",
            "model_fn.py",
            "torch.cartesian_prod(rows, columns)",
            "torch.cartesian_prod(columns, rows)",
        ),
    ),
    bug(
        "padding_counts_as_text",
        "model_fn",
        ALONE,
        qwen_image=Edit(
            "base", "model_fn.py", "None if prompt_mask.all() else prompt_mask", "None"
        ),
        wan=Edit(
            "t2v",
            "model_fn.py",
            "missing = MAX_TOKENS - prompt_emb.shape[1]",
            "missing = 0",
        ),
    ),
    bug(
        "a_latent_shape_is_turned",
        "model_fn",
        SHAPES,
        qwen_image=Edit(
            "base",
            "model_fn.py",
            "1, height // DOWNSCALE, width // DOWNSCALE)",
            "1, width // DOWNSCALE, height // DOWNSCALE)",
        ),
        flux=Edit(
            "dev",
            "model_fn.py",
            "CHANNELS, height // DOWNSCALE, width // DOWNSCALE)",
            "CHANNELS, width // DOWNSCALE, height // DOWNSCALE)",
        ),
        wan=Edit(
            "t2v",
            "model_fn.py",
            "frames, height // spatial, width // spatial)",
            "frames, width // spatial, height // spatial)",
        ),
    ),
    bug(
        "what_is_held_counts_in_the_loss",
        "constrain_latents",
        "the_loss_leaves_out_what_is_held",
        wan=Edit("ti2v-5b", "model_fn.py", "* later, later)", "* later)"),
    ),
    bug(
        "guidance_is_weaker_by_one",
        "guidance",
        STEPS,
        qwen_image=Edit(
            "base",
            "model_fn.py",
            "pack(negative), scale)",
            "pack(negative), scale - 1)",
        ),
        flux=Edit(
            "dev",
            "pipeline.py",
            "    apply_guidance=apply_guidance,",
            "    apply_guidance=lambda one, other, scale: apply_guidance(one, other, scale - 1),",
        ),
        wan=Edit(
            "t2v",
            "pipeline.py",
            "    apply_guidance=apply_guidance,",
            "    apply_guidance=lambda one, other, scale: apply_guidance(one, other, scale - 1),",
        ),
    ),
    bug(
        "the_schedule_has_another_shift",
        "schedule",
        STEPS,
        qwen_image=Edit("base", "pipeline.py", "    shift_terminal=0.02,\n", ""),
        flux=Edit("dev", "pipeline.py", "    base_mu=0.5,", "    base_mu=0.6,"),
        wan=Edit(
            "t2v",
            "pipeline.py",
            "FlowMatchSchedule(shift=5.0,",
            "FlowMatchSchedule(shift=3.0,",
        ),
    ),
    bug(
        "the_schedule_counts_latents_as_tokens",
        "schedule",
        STEPS,
        qwen_image=Edit(
            "base",
            "pipeline.py",
            "latents_per_token=model_fn.PATCH**2",
            "latents_per_token=1",
        ),
        flux=Edit(
            "dev",
            "pipeline.py",
            "latents_per_token=model_fn.PATCH**2",
            "latents_per_token=1",
        ),
    ),
    bug(
        "the_experts_change_places",
        "schedule",
        STEPS,
        wan=Edit(
            "t2v-a14b",
            "pipeline.py",
            '{"dit": (boundary, 1000.0), "dit2": (0.0, boundary)}',
            '{"dit2": (boundary, 1000.0), "dit": (0.0, boundary)}',
        ),
    ),
    bug(
        "sides_are_of_the_vae_alone",
        "columns",
        SHAPES,
        qwen_image=Edit(
            "base",
            "pipeline.py",
            "model_fn.DOWNSCALE * model_fn.PATCH",
            "model_fn.DOWNSCALE",
        ),
        flux=Edit(
            "dev",
            "pipeline.py",
            "model_fn.DOWNSCALE * model_fn.PATCH",
            "model_fn.DOWNSCALE",
        ),
        wan=Edit(
            "ti2v-5b",
            "pipeline.py",
            "**video(32, 24.0)),\n        # The",
            "**video(16, 24.0)),\n        # The",
        ),
    ),
    bug(
        "frames_are_not_those_of_the_vae",
        "columns",
        SHAPES,
        wan=Edit(
            "t2v", "pipeline.py", "FRAMES_PER_LATENT = 4", "FRAMES_PER_LATENT = 2"
        ),
    ),
    bug(
        "a_batch_is_not_padded",
        "columns",
        ALONE,
        qwen_image=Edit(
            "base",
            "pipeline.py",
            '    padded={"prompt_emb": 1, "prompt_mask": 1},\n',
            "",
        ),
        wan=Edit("t2v", "pipeline.py", '    padded={"prompt_emb": 1},\n', ""),
    ),
    bug(
        "a_target_matches_nothing",
        "targets",
        "lora_targets_match_layers",
        qwen_image=Edit(
            "base", "__init__.py", '    "img_mlp.net.2",\n', '    "img_mlp.net.3",\n'
        ),
        flux=Edit("dev", "__init__.py", '    "ff.net.2",\n', '    "ff.net.3",\n'),
        wan=Edit("t2v", "__init__.py", '"ffn.net.2")', '"ffn.net.3")'),
    ),
    bug(
        "a_parameter_that_no_loss_reaches_is_trained",
        "targets",
        "every_trained_parameter_gets_a_gradient",
        qwen_image=Edit(
            "base",
            "pipeline.py",
            '    "transformer_blocks.{last}.attn.to_add_out.*",\n',
            "",
        ),
        wan=Edit(
            "i2v",
            "pipeline.py",
            '("encoder.layers.{last}.*", "post_layernorm.*")',
            '("post_layernorm.*",)',
        ),
    ),
    bug(
        "a_toy_follows_the_clock",
        "toys",
        "equal_arguments_write_equal_toys",
        qwen_image=Edit(
            "base",
            "toy.py",
            "write_components(folder, variant, seed, sizes)",
            "write_components(folder, variant, id([]) % 2**31, sizes)",
        ),
        flux=Edit("dev", "toy.py", TOY_WRITER, TOY_OF_THE_CLOCK),
        wan=Edit("t2v", "toy.py", TOY_WRITER, TOY_OF_THE_CLOCK),
    ),
    bug(
        "files_are_recognized_by_other_names",
        "key maps",
        "the_files_of_every_network_are_recognized",
        qwen_image=Edit(
            "base", "configs/key_maps.json", '"txt_norm.weight"', '"txt_norm.bias"'
        ),
        flux=Edit(
            "dev",
            "configs/key_maps.json",
            '"context_embedder.weight"',
            '"context_embedder.scale"',
        ),
        wan=Edit(
            "t2v",
            "configs/key_maps.json",
            '"condition_embedder.time_proj.weight", "blocks',
            '"condition_embedder.time.weight", "blocks',
        ),
    ),
)
