"""Thirty bugs of the kinds that trainers have had, each as an edit of one file, with
the tests that must then fail.

`test_r15_planted_bugs.py` applies each to a copy of the project. old: a text that
stands once in the file.
"""

from dataclasses import dataclass

CORE = "core/dstrain"
TESTS = "tests/unit"


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
        f"{CORE}/runs/loop.py",
        "        losses.append(loss.detach())\n",
        "        losses.append(loss.detach())\n        run.lr_scheduler.step()\n",
        ("tests/unit/runs/test_loop.py",),
    ),
    Bug(
        "full_training_in_bf16",
        "P2: trained parameters are fp32",
        f"{CORE}/training/trainables.py",
        "parameter.data.to(dtype)",
        "parameter.data.to(torch.bfloat16)",
        ("tests/unit/training/test_trainables.py", "tests/unit/runs/test_loop.py"),
    ),
    Bug(
        "two_makers_of_one_name",
        "P4: one maker per name",
        f"{CORE}/graph/spec.py",
        "            if name in makers:\n",
        "            if name in makers and len(makers) > 99:\n",
        ("tests/unit/graph/test_spec.py",),
    ),
    Bug(
        "dotted_trainables_match_nothing",
        "P6: dotted trainables count as their component",
        f"{CORE}/graph/plan.py",
        'dict.fromkeys(name.partition(".")[0] for name in trainables)',
        "dict.fromkeys(trainables)",
        ("tests/unit/graph/test_plan.py",),
    ),
    Bug(
        "train_steps_run_in_stage_1",
        "R10: what reads the values of a train step is one",
        f"{CORE}/graph/plan.py",
        " or computed & set(unit.inputs)",
        "",
        ("tests/unit/graph/test_plan.py",),
    ),
    Bug(
        "outputs_drift_from_what_is_promised",
        "P7: promised == made",
        f"{CORE}/graph/unit.py",
        "        if set(outputs) != set(self.outputs):\n",
        "        if set(self.outputs) - set(outputs):\n",
        ("tests/unit/graph/test_unit.py",),
    ),
    Bug(
        "every_process_does_the_first_share",
        "P9: N rows on W processes are N rows",
        f"{CORE}/training/batching.py",
        "[rank * batch_size :][:batch_size]",
        "[:batch_size]",
        ("tests/unit/training/test_batching.py",),
    ),
    Bug(
        "whole_storages_are_stored",
        "P12: a view is stored without what lies around it",
        f"{CORE}/graph/unit.py",
        "{name: copy_value(outputs[name], where, name) for name in outputs}",
        "dict(outputs)",
        ("tests/unit/graph/test_unit.py", "tests/unit/graph/test_values.py"),
    ),
    Bug(
        "positive_embedding_as_the_negative_one",
        "P13: the negative side is absent, or right",
        f"{CORE}/graph/plan.py",
        "        return spec.cfg_inputs[name]\n",
        "        return name\n",
        ("tests/unit/graph/test_plan.py",),
    ),
    Bug(
        "timesteps_in_bf16",
        "P15: timesteps stay fp32",
        f"{CORE}/training/losses.py",
        "sigma * TRAIN_TIMESTEPS, noise)\n",
        "(sigma * TRAIN_TIMESTEPS).bfloat16(), noise)\n",
        ("tests/unit/training/test_losses.py", "tests/unit/training/test_module.py"),
    ),
    Bug(
        "training_ignores_the_shift",
        "P16: one schedule serves sampler and loss",
        f"{CORE}/graph/noise_schedule.py",
        "self._shifted(plain, self.training_mu)",
        "np.asarray(plain)",
        ("tests/unit/graph/test_noise_schedule.py",),
    ),
    Bug(
        "loss_of_the_last_micro_batch",
        "P17: the logged loss is the mean over the window",
        f"{CORE}/runs/loop.py",
        "torch.stack(losses).sum()",
        "losses[-1]",
        ("tests/unit/runs/test_loop.py",),
    ),
    Bug(
        "gradients_are_not_clipped",
        "P18: gradients are clipped",
        f"{CORE}/runs/loop.py",
        "run.setup.config.max_grad_norm\n",
        "1e9\n",
        ("tests/unit/runs/test_loop.py",),
    ),
    Bug(
        "resume_with_a_new_optimizer",
        "P19: a run resumes bit for bit",
        f"{CORE}/runs/checkpoints/resume.py",
        "    run.optimizer.load_state_dict(state.optimizer)\n",
        "",
        ("tests/unit/runs/test_loop.py",),
    ),
    Bug(
        "missing_lora_keys_are_ignored",
        "P20: LoRA files are strict both ways",
        f"{CORE}/lora/layers.py",
        "sorted(trained - layers.keys() - set(optional_layers))\n",
        "sorted(())\n",
        ("tests/unit/lora/test_layers.py", "tests/unit/lora/test_refusals.py"),
    ),
    Bug(
        "captions_lose_their_mark",
        "P22: a byte order mark is no part of the first column's name",
        f"{CORE}/data/metadata.py",
        '.decode("utf-8-sig")',
        '.decode("utf-8")',
        ("tests/unit/data/test_metadata.py",),
    ),
    Bug(
        "written_in_place",
        "P24: files are whole or absent",
        f"{CORE}/storage/files.py",
        "    building = temporary(path)\n    try:\n        yield building",
        "    building = path\n    try:\n        yield building",
        ("tests/unit/storage/test_files.py",),
    ),
    Bug(
        "exif_is_ignored",
        "P27: images are upright",
        f"{CORE}/data/images.py",
        "    if orientation in TRANSPOSES:\n",
        "    if orientation in TRANSPOSES and orientation > 8:\n",
        ("tests/unit/data/test_images.py",),
    ),
    Bug(
        "lost_frames_become_others",
        "P28: truncated videos are noticed",
        f"{CORE}/data/videos.py",
        "                if index in missing and not frame.is_corrupt:\n",
        "                if index in missing:\n",
        ("tests/unit/data/test_videos.py",),
    ),
    Bug(
        "one_of_two_plugins_wins",
        "P29: two plugins of one name are refused",
        f"{CORE}/registry/discovery.py",
        "    if len(same) > 1:\n",
        "    if len(same) > 9:\n",
        ("tests/unit/registry/test_discovery.py",),
    ),
    Bug(
        "repeats_share_their_noise",
        "P32: 50 repeats have 50 noises",
        f"{CORE}/training/batching.py",
        "SampleKey(self.seed, epoch, repeat, *self.sample_ids[sample])",
        "SampleKey(self.seed, epoch, 0, *self.sample_ids[sample])",
        ("tests/unit/training/test_batching.py", "tests/unit/runs/test_loop.py"),
    ),
    Bug(
        "damage_is_not_noticed",
        "R5: digests are compared",
        f"{CORE}/runs/checkpoints/state.py",
        "if sha256(folder / name) != digests[name]]",
        "if not (folder / name).stat().st_size]",
        ("tests/unit/runs/checkpoints/test_state.py",),
    ),
    Bug(
        "the_code_of_a_unit_does_not_count",
        "R6: a change of code is seen",
        f"{CORE}/graph/unit.py",
        '"code": code.digest,',
        '"code": "",',
        ("tests/unit/graph/test_unit.py",),
    ),
    Bug(
        "a_changed_caption_finds_old_values",
        "R6: nothing stale is used",
        f"{CORE}/cache/keys.py",
        "unit.identity, dict(inputs), ",
        "unit.identity, sorted(inputs), ",
        ("tests/unit/cache/test_keys.py",),
    ),
    Bug(
        "paths_lead_out_of_the_data_root",
        "R11: nothing outside the data root is read",
        f"{CORE}/data/files.py",
        'os.path.join(path, "").startswith(os.path.join(folder, ""))',
        "bool(path)",
        ("tests/unit/data/test_files.py", "tests/unit/data/test_row_checks.py"),
    ),
    Bug(
        "a_loss_that_is_no_number_updates_weights",
        "exit 5: NaN stops before the update",
        f"{CORE}/runs/loop.py",
        "    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):\n",
        "    if math.isinf(norm_value):\n",
        ("tests/unit/runs/test_loop.py",),
    ),
    Bug(
        "previews_draw_from_training",
        "P30: training is the same with and without previews",
        f"{CORE}/runs/reports/previews.py",
        "                module.training = mode\n",
        "                module.training = mode and False\n",
        ("tests/unit/runs/reports/test_previews.py",),
    ),
    Bug(
        "what_a_hub_sends_is_believed",
        "downloads are compared with the hub's digests",
        f"{CORE}/models/hub/record.py",
        "            return None\n        return DownloadedFile(",
        "            pass\n        return DownloadedFile(",
        (
            "tests/unit/models/hub/test_clients.py",
            "tests/unit/models/hub/test_source.py",
        ),
    ),
    Bug(
        "tokens_in_what_is_written",
        "R13: secrets stay out",
        f"{CORE}/console.py",
        "        text = text.replace(value, HIDDEN)\n",
        "        text = text + ''\n",
        ("tests/reliability/test_r13_secrets.py",),
    ),
    Bug(
        "skipping_renumbers_the_rows",
        "--on_bad_sample skip leaves the order of the other rows as it is",
        f"{CORE}/training/batching.py",
        "range(rows) if row not in present]\n",
        "range(0) if row not in present]\n",
        (
            "tests/unit/training/test_batching.py",
            "tests/unit/runs/test_skipped_rows.py",
        ),
    ),
    Bug(
        "the_wrong_rows_of_a_fused_layer",
        "P26: a fused LoRA layer splits exactly",
        f"{CORE}/lora/reader.py",
        "layer.up[one.start : one.stop])",
        "layer.up[: one.stop - one.start])",
        ("tests/unit/lora/test_reader.py",),
    ),
)
