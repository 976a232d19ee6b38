"""Thirty bugs of the kinds that trainers have had, each as an edit of one file, with the tests that must then fail.

`test_r15_planted_bugs.py` applies each to a copy of the project. old: a text that stands once in the file.
"""

from dataclasses import dataclass

CORE = "core/dstrain"
TESTS = "tests/core"


@dataclass(frozen=True)
class Bug:
    """One edit; breaks: the promise (of a pitfall or of reliability) that it breaks."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BUGS = (
    Bug(
        "schedule_counts_micro_batches",
        "P1: the schedule counts optimizer steps",
        f"{CORE}/train.py",
        "        losses.append(loss.detach())\n",
        "        losses.append(loss.detach())\n        job.scheduler.step()\n",
        (f"{TESTS}/test_train.py",),
    ),
    Bug(
        "full_training_in_bf16",
        "P2: trained parameters are fp32",
        f"{CORE}/trainables.py",
        ".float().requires_grad_(True)",
        ".requires_grad_(True)",
        (f"{TESTS}/test_trainables.py", f"{TESTS}/test_train.py"),
    ),
    Bug(
        "two_makers_of_one_name",
        "P4: one maker per name",
        f"{CORE}/wiring.py",
        "            if name in makers:\n",
        "            if name in makers and len(makers) > 99:\n",
        (f"{TESTS}/test_wiring.py",),
    ),
    Bug(
        "dotted_trainables_match_nothing",
        "P6: dotted trainables count as their component",
        f"{CORE}/plan.py",
        'dict.fromkeys(name.partition(".")[0] for name in trainables)',
        "dict.fromkeys(trainables)",
        (f"{TESTS}/test_plan.py",),
    ),
    Bug(
        "live_units_run_in_stage_1",
        "R10: what reads a live unit's values is live",
        f"{CORE}/plan.py",
        " or made & set(unit.reads):\n            live.add",
        ":\n            live.add",
        (f"{TESTS}/test_plan.py",),
    ),
    Bug(
        "outputs_drift_from_what_is_promised",
        "P7: promised == made",
        f"{CORE}/unit.py",
        "        if set(made) != set(self.makes):\n",
        "        if set(self.makes) - set(made):\n",
        (f"{TESTS}/test_unit.py",),
    ),
    Bug(
        "every_process_does_the_first_share",
        "P9: N rows on W processes are N rows",
        f"{CORE}/order.py",
        "[rank * batch_size : (rank + 1) * batch_size]",
        "[:batch_size]",
        (f"{TESTS}/test_order.py",),
    ),
    Bug(
        "whole_storages_are_stored",
        "P12: a view is stored without what lies around it",
        f"{CORE}/unit.py",
        "{name: own(value, held) for name, value in made.items()}",
        "dict(made)",
        (f"{TESTS}/test_unit.py", f"{TESTS}/test_values.py"),
    ),
    Bug(
        "positive_embedding_as_the_negative_one",
        "P13: the negative side is absent, or right",
        f"{CORE}/plan.py",
        '        return wiring.per_side[name] if side == "negative" else side_name(name, side)\n',
        "        return name\n",
        (f"{TESTS}/test_plan.py",),
    ),
    Bug(
        "timesteps_in_bf16",
        "P15: timesteps stay fp32",
        f"{CORE}/losses.py",
        "sigma * TRAIN_TIMESTEPS, noise)",
        "(sigma * TRAIN_TIMESTEPS).bfloat16(), noise)",
        (f"{TESTS}/test_losses.py", f"{TESTS}/test_module.py"),
    ),
    Bug(
        "training_ignores_the_shift",
        "P16: one schedule serves sampler and loss",
        f"{CORE}/schedule.py",
        "self._shifted(plain, self.training_mu)",
        "np.asarray(plain)",
        (f"{TESTS}/test_schedule.py",),
    ),
    Bug(
        "loss_of_the_last_micro_batch",
        "P17: the logged loss is the mean over the window",
        f"{CORE}/train.py",
        "torch.stack(losses).sum()",
        "losses[-1]",
        (f"{TESTS}/test_train.py",),
    ),
    Bug(
        "gradients_are_not_clipped",
        "P18: gradients are clipped",
        f"{CORE}/train.py",
        "job.setup.config.max_grad_norm)",
        "1e9)",
        (f"{TESTS}/test_train.py",),
    ),
    Bug(
        "resume_with_a_new_optimizer",
        "P19: resume goes on bit for bit",
        f"{CORE}/resume.py",
        '    getattr(job.optimizer, "optimizer", job.optimizer).load_state_dict(dict(state.optimizer))\n',
        "",
        (f"{TESTS}/test_train.py",),
    ),
    Bug(
        "missing_lora_keys_are_ignored",
        "P20: LoRA files are strict both ways",
        f"{CORE}/lora.py",
        '"trained, and not in the file": sorted(inside - layers.keys() - set(spare)),',
        '"trained, and not in the file": [],',
        (f"{TESTS}/test_lora.py", f"{TESTS}/test_lora_refusals.py"),
    ),
    Bug(
        "captions_lose_their_mark",
        "P22: a byte order mark is no part of the first column's name",
        f"{CORE}/metadata.py",
        "data = data.removeprefix(BYTE_ORDER_MARK)",
        "data = bytes(data)",
        (f"{TESTS}/test_metadata.py",),
    ),
    Bug(
        "written_in_place",
        "P24: files are whole or absent",
        f"{CORE}/files.py",
        "    building = temporary(path)\n    try:\n        yield building",
        "    building = path\n    try:\n        yield building",
        (f"{TESTS}/test_files.py",),
    ),
    Bug(
        "exif_is_ignored",
        "P27: pictures are upright",
        f"{CORE}/pictures.py",
        "    if orientation in TURNS:\n",
        "    if orientation in TURNS and orientation > 8:\n",
        (f"{TESTS}/test_pictures.py",),
    ),
    Bug(
        "lost_frames_become_others",
        "P28: half-written videos are noticed",
        f"{CORE}/videos.py",
        "                if index in missing and not frame.is_corrupt:\n",
        "                if index in missing:\n",
        (f"{TESTS}/test_videos.py",),
    ),
    Bug(
        "one_of_two_plugins_wins",
        "P29: two plugins of one name are refused",
        f"{CORE}/plugins.py",
        'if len(same) > 1 else ""',
        'if len(same) > 9 else ""',
        (f"{TESTS}/test_plugins.py",),
    ),
    Bug(
        "repeats_share_their_noise",
        "P32: 50 repeats have 50 noises",
        f"{CORE}/order.py",
        "SampleKey(self.seed, epoch, repeat, row, chunk)",
        "SampleKey(self.seed, epoch, 0, row, chunk)",
        (f"{TESTS}/test_order.py", f"{TESTS}/test_train.py"),
    ),
    Bug(
        "damage_is_not_noticed",
        "R5: digests are compared",
        f"{CORE}/checkpoint.py",
        "if sha256(folder / name) != digests[name]]",
        "if not (folder / name).stat().st_size]",
        (f"{TESTS}/test_checkpoint.py",),
    ),
    Bug(
        "a_changed_caption_finds_old_values",
        "R6: nothing stale is used",
        f"{CORE}/keys.py",
        "dict(reads), borrowed, dtype, side]",
        "sorted(reads), borrowed, dtype, side]",
        (f"{TESTS}/test_keys.py",),
    ),
    Bug(
        "paths_lead_out_of_the_data_root",
        "R11: nothing outside the data root is read",
        f"{CORE}/data_files.py",
        'any(os.path.join(path, "").startswith(os.path.join(folder, "")) for folder in self.folders)',
        "bool(path)",
        (f"{TESTS}/test_data_files.py", f"{TESTS}/test_dataset.py"),
    ),
    Bug(
        "a_loss_that_is_no_number_updates_weights",
        "exit 5: NaN stops before the update",
        f"{CORE}/train.py",
        "    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):\n",
        "    if math.isinf(norm_value):\n",
        (f"{TESTS}/test_train.py",),
    ),
    Bug(
        "previews_draw_from_training",
        "P30: training is the same with and without previews",
        f"{CORE}/previews.py",
        "                module.training = mode\n",
        "                module.training = mode and False\n",
        (f"{TESTS}/test_previews.py",),
    ),
    Bug(
        "what_a_hub_sends_is_believed",
        "downloads are compared with the hub's digests",
        f"{CORE}/hub_record.py",
        "    return not digest or sha256(path) == digest\n",
        "    return True\n",
        (f"{TESTS}/test_hub_faults.py", f"{TESTS}/test_hubs.py"),
    ),
    Bug(
        "tokens_in_what_is_written",
        "R13: secrets stay out",
        f"{CORE}/redaction.py",
        "        text = text.replace(value, HIDDEN)\n",
        "        text = text + ''\n",
        (f"{TESTS}/reliability/test_r13_secrets.py",),
    ),
    Bug(
        "skipping_renumbers_the_rows",
        "--on_bad_sample skip leaves the order of the other rows as it is",
        f"{CORE}/order.py",
        "    gaps = [((row, 0), LEFT_OUT) for row in sorted(set(range(rows)) - {row for row, _ in places})]\n",
        "    gaps: list[tuple[tuple[int, int], int]] = []\n",
        (f"{TESTS}/test_order.py", f"{TESTS}/test_bad_samples.py"),
    ),
    Bug(
        "the_wrong_rows_of_a_fused_layer",
        "P26: a fused LoRA layer splits exactly",
        f"{CORE}/lora_files.py",
        "layer.up[rows.start : rows.stop])",
        "layer.up[: rows.stop - rows.start])",
        (f"{TESTS}/test_lora_files.py",),
    ),
)
