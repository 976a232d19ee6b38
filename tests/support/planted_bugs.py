"""Fifty bugs and more of the kinds that trainers have had, each as an edit of one file, with
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
        "losses[0] if len(losses) == 1 else torch.stack(losses).sum()",
        "losses[-1]",
        ("tests/unit/runs/test_loop.py",),
    ),
    Bug(
        "gradients_are_not_clipped",
        "P18: gradients are clipped",
        f"{CORE}/runs/loop.py",
        "run.setup.config.max_grad_norm or math.inf\n",
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
        f"{CORE}/lora/initial_layers.py",
        "sorted(trained - layers.keys() - set(optional_layers))\n",
        "sorted(())\n",
        ("tests/unit/lora/test_initial_layers.py", "tests/unit/lora/test_refusals.py"),
    ),
    Bug(
        "captions_lose_their_mark",
        "P22: a byte order mark is no part of the first column's name",
        f"{CORE}/data/forms/metadata.py",
        "            if file.read(len(BOM)) != BOM:\n                file.seek(0)\n",
        "            file.seek(0)\n",
        ("tests/unit/data/forms/test_metadata.py",),
    ),
    Bug(
        "work_is_divided_by_position",
        "P9: processes agree on who computes what",
        f"{CORE}/runs/stage_1/shares.py",
        '    dealt = np.argsort(np.frombuffer(addresses, ADDRESS), kind="stable")\n',
        "    dealt = np.arange(len(work))\n",
        ("tests/unit/runs/stage_1/test_shares.py",),
    ),
    Bug(
        "two_machines_hold_a_folder",
        "P31: one process holds a folder",
        f"{CORE}/storage/locks.py",
        "        return is_alive(path, mark)\n",
        "        return False\n",
        ("tests/unit/storage/test_locks.py",),
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
        "a_position_counts_as_the_step",
        "a run resumes after its last step, not after its position",
        f"{CORE}/training/batching.py",
        "self._keys(epoch, batches[left_out:])",
        "self._keys(epoch, batches)",
        ("tests/unit/training/test_batching.py",),
    ),
    Bug(
        "repeats_share_their_noise",
        "P32: 50 repeats have 50 noises",
        f"{CORE}/training/batching.py",
        "SampleKey(self.seed, epoch, repeat, row, chunk)",
        "SampleKey(self.seed, epoch, 0, row, chunk)",
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
        (
            "tests/unit/runs/test_loop.py"
            "::test_a_loss_that_is_not_a_number_ends_the_run_and_changes_no_weight",
        ),
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
        "np.bincount(own_ids[:, 0], minlength=rows) == 0)\n",
        "np.bincount(own_ids[:, 0], minlength=rows) < 0)\n",
        (
            "tests/unit/training/test_batching.py",
            "tests/unit/runs/test_skipped_rows.py",
        ),
    ),
    Bug(
        "the_wrong_rows_of_a_fused_layer",
        "P26: a fused LoRA layer splits exactly",
        f"{CORE}/lora/fusing.py",
        "torch.cat([fused[one.start : one.stop] for one in own])",
        "torch.cat([fused[: one.stop - one.start] for one in own])",
        ("tests/unit/lora/test_fusing.py", "tests/unit/lora/test_reader.py"),
    ),
    Bug(
        "fp8_without_its_scale",
        "quantized weights are restored as large as they were",
        f"{CORE}/models/quantization/encodings.py",
        "return scaled(packed.view(FP8).to(dtype), scale, dtype)",
        "return packed.view(FP8).to(dtype)",
        (f"{TESTS}/models/quantization/test_encodings.py",),
    ),
    Bug(
        "a_scale_per_column",
        "an fp8 weight has a scale per output channel",
        f"{CORE}/models/quantization/encodings.py",
        "exact.abs().amax(1, keepdim=True)",
        "exact.abs().amax(0, keepdim=True)",
        (f"{TESTS}/models/quantization/test_encodings.py",),
    ),
    Bug(
        "restored_weights_are_kept",
        "autograd keeps the stored weight, not a restored one",
        f"{CORE}/models/quantization/linear.py",
        "        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]\n"
        "            x, bias, self.restore, self.dtype, dtype, *self.stored\n"
        "        )\n",
        "        product = functional.linear(x, self.restored().to(dtype), bias)\n",
        (
            f"{TESTS}/models/quantization/test_linear.py"
            "::test_autograd_keeps_the_stored_weight_and_no_restored_one",
        ),
    ),
    Bug(
        "stage_2_stores_fewer_layers",
        "R20: both stages store the same layers",
        f"{CORE}/runs/setup.py",
        "        files = with_kept(found.files, self.kept, presets)\n",
        '        kept = {} if self.stage == "train" else self.kept\n'
        "        files = with_kept(found.files, kept, presets)\n",
        (
            "tests/reliability/test_r20_quantized_runs.py"
            "::test_a_run_on_quantized_weights_is_the_same_bits"
            "[int8_block-1 processes, in two stages]",
        ),
    ),
    Bug(
        "values_of_plain_encoders_for_quantized_ones",
        "R20: keys of cached values have the method of the encoder",
        f"{CORE}/models/needed_components.py",
        "        if files.kept.identity:\n",
        "        if files.kept.identity and files.kept.offloaded:\n",
        (
            "tests/reliability/test_r20_quantized_runs.py"
            "::test_only_what_depends_on_a_quantized_component_is_computed_again",
        ),
    ),
    Bug(
        "a_plan_of_plain_encoders_for_quantized_ones",
        "R20: stage 2 asks for what was encoded with its methods",
        f"{CORE}/runs/plan_identity.py",
        "        kept = setup.kept.get(name, AS_LOADED).identity\n",
        "        kept = AS_LOADED.identity\n",
        (
            "tests/reliability/test_r20_quantized_runs.py"
            "::test_what_a_stage_or_a_resumed_run_stores_differently_is_refused",
        ),
    ),
    Bug(
        "resumed_on_weights_stored_otherwise",
        "R20: a run resumes on weights that are stored as they were",
        f"{CORE}/runs/checkpoints/run_identity.py",
        "    return {name: identity for name, identity in identities.items() if identity}\n",
        "    return {}\n",
        (
            "tests/reliability/test_r20_quantized_runs.py"
            "::test_what_a_stage_or_a_resumed_run_stores_differently_is_refused",
        ),
    ),
    Bug(
        "lora_is_drawn_in_the_dtype_of_its_layer",
        "LoRA starts from the same numbers, however its layer is stored",
        f"{CORE}/lora/adapters.py",
        "_as_linear_layers(), _drawn_in_fp32(module):",
        "_as_linear_layers():",
        (
            f"{TESTS}/models/quantization/test_linear.py"
            "::test_lora_starts_from_the_same_numbers_whatever_the_layer_is_stored_as",
        ),
    ),
    Bug(
        "swapped_blocks_are_dropped_too_early",
        "R21: a swapped block is there until its gradients are",
        f"{CORE}/training/offload/block_swap.py",
        "            if not _in_backward_pass():\n                self._drop(number)\n",
        "            self._drop(number)\n",
        (f"{TESTS}/training/offload/test_block_swap.py",),
    ),
    Bug(
        "the_wrong_block_is_copied_ahead",
        "R21: a swapped block is copied while the one before it computes",
        f"{CORE}/training/offload/block_swap.py",
        "            following = block.previous\n",
        "            following = block.next\n",
        (
            f"{TESTS}/training/offload/test_block_swap.py"
            "::test_a_block_is_on_its_way_while_the_one_before_it_computes",
        ),
    ),
    Bug(
        "swapped_blocks_stay_on_the_device",
        "R21: no more than two swapped blocks are on the device",
        f"{CORE}/training/offload/block_swap.py",
        "        self._drop_all_but(wanted)\n",
        "",
        (f"{TESTS}/training/offload/test_block_swap.py",),
    ),
    Bug(
        "swapped_weights_are_copied_back",
        "R21: frozen weights in RAM never change",
        f"{CORE}/models/execution/ram.py",
        'and no numbers."""\n        self._copy = None\n',
        'and no numbers."""\n'
        "        if self._copy is not None:\n"
        "            self._ram.copy_(self._copy)\n"
        "        self._copy = None\n",
        (f"{TESTS}/training/offload/test_block_swap.py",),
    ),
    Bug(
        "values_of_a_whole_image_for_its_tiles",
        "keys of cached values have the tiles of the VAE",
        f"{CORE}/models/needed_components.py",
        '            parts.append({"tiles": found.tiles[name].identity})\n',
        "            pass\n",
        (
            f"{TESTS}/pipeline/test_tile_choice.py"
            "::test_only_the_digests_of_vaes_change_and_equal_tiles_have_equal_ones",
        ),
    ),
    Bug(
        "the_average_is_not_saved",
        "an average over the steps resumes exactly",
        f"{CORE}/runs/checkpoints/resume.py",
        '    averaged.load(state.average, int(state.average_facts["steps"]))\n',
        "    averaged.restart()\n",
        (
            f"{TESTS}/runs/checkpoints/test_resume.py"
            "::test_the_average_over_the_steps_resumes_exactly",
        ),
    ),
    Bug(
        "the_average_counts_steps_twice",
        "an average is that of the weights of every step",
        f"{CORE}/runs/loop.py",
        "                run.ema.update()\n",
        "                run.ema.update()\n                run.ema.update()\n",
        (
            f"{TESTS}/runs/checkpoints/test_outputs.py"
            "::test_the_average_is_that_of_the_weights_of_every_step",
        ),
    ),
    Bug(
        "validation_draws_from_training",
        "training is the same with and without validation",
        f"{CORE}/runs/validation_loss.py",
        "    with run.weights_to_use(), undisturbed(module.pipeline), bar:\n",
        "    with run.weights_to_use(), torch.no_grad(), bar:\n",
        (f"{TESTS}/runs/test_validation_loss.py",),
    ),
    Bug(
        "each_process_rounds_by_chances_of_its_own",
        "bf16 weights are rounded alike on all processes",
        f"{CORE}/runs/loop.py",
        '    seed_global((run.setup.config.seed, run.step), "optimizer")\n',
        '    seed_global((run.setup.config.seed, run.step, run.processes.rank), "optimizer")\n',
        (f"{TESTS}/training/optimizers/test_runs.py::test_two_processes_round_alike",),
    ),
    Bug(
        "a_matrices_learn_at_a_multiple",
        "--loraplus_lr_ratio is of B matrices",
        f"{CORE}/training/optimizers/groups.py",
        "        if UP.search(name):\n",
        "        if not UP.search(name):\n",
        (
            f"{TESTS}/training/optimizers/test_groups.py"
            "::test_b_matrices_learn_at_a_multiple",
        ),
    ),
    Bug(
        "weights_in_training_are_saved",
        "weights that an optimizer averages are saved averaged",
        f"{CORE}/runs/checkpoints/outputs.py",
        "            with in_eval_mode(run.optimizer):\n                for",
        "            if names:\n                for",
        (
            f"{TESTS}/training/optimizers/test_runs.py"
            "::test_averaged_weights_are_saved_and_those_in_training_resumed",
        ),
    ),
    Bug(
        "rows_of_another_process",
        "a process resumes with its own rows",
        f"{CORE}/training/sharded_networks.py",
        "        return _own_rows(len(owner), owner.device_mesh)\n",
        "        own = _own_rows(len(owner), owner.device_mesh)\n"
        "        return slice(len(owner) - own.stop, len(owner) - own.start)\n",
        (f"{TESTS}/training/test_sharded_networks.py",),
    ),
    Bug(
        "clipped_by_the_norm_of_own_rows",
        "divided gradients are clipped by their whole norm",
        f"{CORE}/training/optimizers/clipping.py",
        "    dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))\n",
        "",
        (
            f"{TESTS}/training/test_sharded_networks.py"
            "::test_gradients_and_their_norm_are_those_of_one_process",
        ),
    ),
    Bug(
        "all_weights_are_read_first",
        "a weight is free before the next is read",
        f"{CORE}/models/networks.py",
        "in weights.read(wanted, dtype, rows):\n",
        "in list(weights.read(wanted, dtype, rows)):\n",
        (
            f"{TESTS}/pipeline/test_loading.py"
            "::test_a_weight_is_free_before_the_next_is_read",
        ),
    ),
    Bug(
        "a_launchers_file_is_ignored",
        "what a launcher's file says is done or refused",
        f"{CORE}/runs/launch/settings.py",
        "    if switched_on(environment, DEEPSPEED):\n",
        "    if switched_on(environment, DEEPSPEED) and flags:\n",
        (f"{TESTS}/runs/launch/test_settings.py",),
    ),
    Bug(
        "a_part_of_a_word_is_the_trigger_word",
        "the trigger word is in every caption",
        f"{CORE}/data/variants/captions.py",
        "        if has_word(caption, self.trigger):\n",
        "        if self.trigger in caption:\n",
        (f"{TESTS}/data/variants/test_captions.py",),
    ),
    Bug(
        "a_bucket_of_any_shape",
        "an image has the bucket whose aspect ratio is the nearest",
        f"{CORE}/data/variants/buckets.py",
        "        return min(candidates, key=lambda bucket: _difference(size, bucket))\n",
        "        return max(candidates, key=lambda bucket: bucket[0] * bucket[1])\n",
        (f"{TESTS}/data/variants/test_buckets.py",),
    ),
    Bug(
        "the_first_dataset_is_named_for_all",
        "a row of several datasets has its place in its own",
        f"{CORE}/data/forms/joined.py",
        '        part = int(np.searchsorted(self.first, row, "right")) - 1\n',
        '        part = int(np.searchsorted(self.first, row, "right")) * 0\n',
        (f"{TESTS}/data/forms/test_joined.py",),
    ),
    Bug(
        "a_small_mask_makes_a_small_loss",
        "a masked loss is the mean over what counts",
        f"{CORE}/training/losses.py",
        "    return loss_weight / mean.view(-1, *[1] * (loss_weight.ndim - 1))\n",
        "    return loss_weight / mean.clamp(min=1).view(\n"
        "        -1, *[1] * (loss_weight.ndim - 1)\n"
        "    )\n",
        (f"{TESTS}/training/test_losses.py",),
    ),
    Bug(
        "dora_of_the_lengths_without_lora",
        "a DoRA that is merged acts as the one that was trained",
        f"{CORE}/lora/layers.py",
        "        return (self._magnitude_on(weight) / row_lengths(total))[:, None] * total\n",
        "        return (self._magnitude_on(weight) / row_lengths(weight))[:, None] * total\n",
        (f"{TESTS}/runs/test_lora_types.py", f"{TESTS}/lora/test_layers.py"),
    ),
    Bug(
        "lokr_without_alpha_over_rank",
        "a LoKr that is read acts as the one that was trained",
        f"{CORE}/lora/lokr.py",
        "        return self.scale * torch.kron(first, _product(self.second).float())\n",
        "        return torch.kron(first, _product(self.second).float())\n",
        (f"{TESTS}/lora/test_lokr.py",),
    ),
    Bug(
        "differences_without_their_scale",
        "a scale applies to all that a LoRA file changes",
        f"{CORE}/lora/foreign/differences.py",
        "    added = scale * difference.float().to(parameter.device)\n",
        "    added = difference.float().to(parameter.device)\n",
        (f"{TESTS}/lora/foreign/test_differences.py",),
    ),
    Bug(
        "a_preset_without_its_scale_in_keys",
        "what is cached with a preset of another scale is computed anew",
        f"{CORE}/models/needed_components.py",
        "            if files.preset.changes:\n",
        "            if False:\n",
        (f"{TESTS}/pipeline/test_preset_choice.py",),
    ),
    Bug(
        "any_name_before_an_equals_sign_is_a_component",
        "a path of a LoRA file may contain '='",
        f"{CORE}/config/fields.py",
        "        if self.component or not rest or head not in components:\n",
        "        if self.component or not rest:\n",
        (f"{TESTS}/config/test_fields.py",),
    ),
)
