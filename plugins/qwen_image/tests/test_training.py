"""Training Qwen-Image at toy sizes: gradients, precision, resuming, several
processes, and what is saved.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import QwenImagePipeline
from dstrain import (
    Batch,
    GenerateConfig,
    Interrupted,
    ModelConfig,
    Pipeline,
    TrainConfig,
    TrainingModule,
    generate,
    run,
)
from dstrain.distributed import ProcessGroup
from dstrain.runs import open_training_data, prepare
from dstrain.runs.checkpoints.state import load_state, states
from dstrain.runs.loop import optimizer_steps, steps
from dstrain.runs.resolve import resolve
from dstrain.runs.training_run import TrainingRun
from dstrain_qwen_image.model_fn import pack
from dstrain_qwen_image.toy import write
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.support.published_steps import add_to, assert_equal_steps

CAPTIONS = (
    "a dog",
    "",
    "two dogs that run over a long bridge in the rain",
    "a cat",
    "dog",
    "an apple on a table",
)
PARTS = ("transformer", "text_encoder", "vae")
LOGGED = ("step", "epoch", "learning_rate", "loss", "grad_norm")
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 4, "lora_alpha": 6.0},
    "dit": {"trainable_models": "dit"},
    "text_encoder": {"trainable_models": "text_encoder"},
    "text_encoder and LoRA": {
        "trainable_models": "text_encoder",
        "lora_base_model": "dit",
        "lora_rank": 4,
    },
    "LoRA in the text_encoder": {"lora_base_model": "text_encoder", "lora_rank": 4},
    "parts": {
        "trainable_models": "dit.transformer_blocks.0,text_encoder.model.language_model.layers.1"
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images of two sizes."""
    folder = tmp_path_factory.mktemp("data")
    numbers = np.random.default_rng(0)
    lines = ["image,prompt"]
    for i, caption in enumerate(CAPTIONS):
        size = (32, 32, 3) if i % 2 else (32, 48, 3)
        Image.fromarray(numbers.integers(0, 256, size, np.uint8)).save(
            folder / f"{i}.png"
        )
        lines.append(f"{i}.png,{caption}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def weights(folder: Path, part: str) -> list[str]:
    return sorted(map(str, (folder / part).glob("*.safetensors")))


@pytest.fixture
def config(toy_folder: Path, data: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        model="qwen_image",
        model_paths=json.dumps([weights(toy_folder, part) for part in PARTS]),
        dataset_base_path=data,
        output_path=tmp_path / "out",
        learning_rate=1e-2,
    )


def having(config: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**vars(config), **changes})


def training_run(
    config: TrainConfig, module_class: type[TrainingModule] = TrainingModule
) -> TrainingRun:
    setup, processes = resolve(config), ProcessGroup(Accelerator(cpu=True))
    return prepare(setup, processes, open_training_data(setup), module_class)


def first_gradients(config: TrainConfig) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The first loss and its gradients, LoRA's second factors not being zero."""
    ready = training_run(config)
    with torch.no_grad():
        for name, parameter in ready.module.trained.parameters.items():
            if "lora_B" in name:
                parameter.copy_(
                    torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter)
                )
    _, batches = next(optimizer_steps(ready))
    total = torch.stack([ready.module(batch) for batch in batches]).sum()
    total.backward()
    gradients = {
        name: value.grad for name, value in ready.module.trained.parameters.items()
    }
    return total.detach(), gradients


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def log(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "logs/loss.csv").open() as file:
        return [tuple(row[name] for name in LOGGED) for row in csv.DictReader(file)]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_every_trained_parameter_is_fp32_and_gets_a_gradient(
    name: str, precision: str, config: TrainConfig
) -> None:
    flags = having(config, mixed_precision=precision, batch_size=2, **TRAINED[name])
    loss, gradients = first_gradients(flags)
    assert loss.isfinite()
    assert [
        parameter
        for parameter, gradient in gradients.items()
        if gradient is None or not gradient.any()
    ] == []
    assert {
        gradient.dtype for gradient in gradients.values() if gradient is not None
    } == {torch.float32}


def test_what_no_loss_reaches_is_frozen(config: TrainConfig) -> None:
    module = training_run(having(config, trainable_models="dit,text_encoder")).module
    last = {
        name.removeprefix("dit.transformer_blocks.1.").rpartition(".")[0]
        for name in module.trained.unused_parameters
    }
    assert {
        "attn.add_q_proj",
        "attn.norm_added_q",
        "attn.to_add_out",
        "txt_mlp.net.2",
    } <= last
    assert any(
        name.startswith("text_encoder.lm_head")
        for name in module.trained.unused_parameters
    )
    assert module.trained.parameters.keys().isdisjoint(module.trained.unused_parameters)


@pytest.mark.parametrize(
    "flag", ["use_gradient_checkpointing", "use_gradient_checkpointing_offload"]
)
@pytest.mark.parametrize(
    "name", ["LoRA", "dit", "text_encoder", "text_encoder and LoRA"]
)
def test_checkpointing_changes_no_gradient_by_a_bit(
    name: str, flag: str, config: TrainConfig
) -> None:
    plain = having(config, batch_size=3, **TRAINED[name])
    loss, gradients = first_gradients(plain)
    other_loss, other_gradients = first_gradients(having(plain, **{flag: True}))
    assert torch.equal(loss, other_loss)
    assert same(gradients, other_gradients)


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("use_gradient_checkpointing", "dit"),
        ("use_gradient_checkpointing_offload", "text_encoder"),
    ],
)
def test_checkpointing_keeps_less(flag: str, name: str, config: TrainConfig) -> None:
    def kept(flags: TrainConfig) -> int:
        ready, total = training_run(flags), 0
        _, (batch,) = next(optimizer_steps(ready))

        def pack_bytes(value: Tensor) -> Tensor:
            nonlocal total
            total += value.nbytes
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack_bytes, lambda value: value):
            ready.module(batch)
        return total

    plain = having(config, **TRAINED[name])
    assert kept(having(plain, **{flag: True})) < 0.8 * kept(plain)


@pytest.mark.parametrize("name", ["dit", "LoRA"])
def test_accumulation_gives_the_gradients_of_a_batch_as_large(
    name: str, config: TrainConfig
) -> None:
    """Texts of several lengths are padded in the batch, and none is in a batch of one."""
    common = having(config, dataset_repeat=4, **TRAINED[name])
    loss, gradients = first_gradients(having(common, batch_size=4))
    other_loss, other_gradients = first_gradients(
        having(common, gradient_accumulation_steps=4)
    )
    assert abs(loss - other_loss) <= 1e-6
    assert gradients.keys() == other_gradients.keys()
    assert (
        max(
            (gradients[key] - other_gradients[key]).abs().max().item()
            for key in gradients
        )
        <= 1e-6
    )


def test_accumulation_gives_the_weights_of_a_batch_as_large(
    config: TrainConfig, tmp_path: Path
) -> None:
    """LoRA: what has no gradient but rounding errors, such as the bias of an
    attention's keys, AdamW moves at will.
    """
    common = having(
        config, dataset_repeat=4, learning_rate=1e-4, max_steps=6, **TRAINED["LoRA"]
    )
    run(having(common, output_path=tmp_path / "batch", batch_size=4))
    run(
        having(
            common, output_path=tmp_path / "accumulated", gradient_accumulation_steps=4
        )
    )
    batch, accumulated = (
        load_file(tmp_path / way / "epoch-0.safetensors")
        for way in ("batch", "accumulated")
    )
    assert batch.keys() == accumulated.keys()
    assert (
        max((batch[key] - accumulated[key]).abs().max().item() for key in batch) <= 1e-6
    )
    assert max(batch[key].abs().max().item() for key in batch if "lora_B" in key) > 5e-4


@pytest.mark.parametrize("name", ["LoRA", "text_encoder and LoRA"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    name: str, config: TrainConfig, tmp_path: Path
) -> None:
    """The text encoder has dropout."""

    class Stopping(TrainingModule):
        calls = 0

        def forward(self, batch: Batch) -> Tensor:
            self.calls += 1
            if self.calls > 7:
                raise KeyboardInterrupt
            return super().forward(batch)

    flags = having(
        config,
        num_epochs=2,
        gradient_accumulation_steps=2,
        lr_scheduler="cosine",
        save_steps=2,
        **TRAINED[name],
    )
    whole, cut = (having(flags, output_path=tmp_path / way) for way in ("whole", "cut"))
    run(whole)
    with pytest.raises(Interrupted):
        run(cut, Stopping)
    run(having(cut, resume="auto"))
    saved = [path.name for path in sorted((tmp_path / "whole").glob("*.safetensors"))]
    assert len(saved) >= 4
    for file in saved:
        assert same(
            load_file(tmp_path / "whole" / file), load_file(tmp_path / "cut" / file)
        ), file
    ends = [load_state(states(tmp_path / way)[0]) for way in ("whole", "cut")]
    assert ends[0].step == ends[1].step == 8
    for i, moments in ends[0].optimizer["state"].items():
        assert same(moments, ends[1].optimizer["state"][i])
    assert log(tmp_path / "whole") == log(tmp_path / "cut")


@pytest.mark.parametrize("name", ["LoRA", "text_encoder", "parts"])
def test_in_bf16_the_split_equals_the_unsplit_run_too(
    name: str, config: TrainConfig, tmp_path: Path
) -> None:
    flags = having(
        config,
        mixed_precision="bf16",
        batch_size=2,
        feature_cache=tmp_path / "cache",
        **TRAINED[name],
    )
    whole = [numbers["loss"] for numbers in steps(training_run(flags))]
    run(having(flags, task="sft:data_process"))
    assert [
        numbers["loss"]
        for numbers in steps(training_run(having(flags, task="sft:train")))
    ] == whole
    assert len(whole) == 4
    assert np.isfinite(whole).all()
    exact = [
        numbers["loss"]
        for numbers in steps(training_run(having(flags, mixed_precision="no")))
    ]
    assert whole != exact
    assert whole == pytest.approx(exact, rel=0.1)


def test_prompts_of_all_lengths_make_the_same_batches_in_a_split_run(
    config: TrainConfig, data: Path, tmp_path: Path
) -> None:
    """A batch of eight rows is of prompts that are at most half as long again, each of
    another length.
    """
    folder = tmp_path / "prompts"
    shutil.copytree(data, folder)
    lines = ["image,prompt"]
    lines += [f"1.png,{'a dog ' * (3 + row % 7 * 8)}number {row}" for row in range(28)]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    flags = having(
        config,
        dataset_base_path=folder,
        feature_cache=tmp_path / "cache",
        batch_size=8,
        **TRAINED["LoRA"],
    )
    run(having(flags, task="sft:data_process"))
    unsplit, split = (
        training_run(having(flags, task=task)) for task in ("sft", "sft:train")
    )
    assert list(unsplit.order.groups) == list(split.order.groups)
    lengths = []
    for _, (batch,) in optimizer_steps(split):
        tokens = [sample.values["prompt_emb"].shape[1] for sample in batch.samples]
        lengths.append((min(tokens), max(tokens)))
        split.step += 1
    assert any(least < most for least, most in lengths)
    # 18 bytes are some 15 tokens of the toy tokenizer; SUFFIX adds as many to all.
    assert all(most < 1.6 * least for least, most in lengths if most > 64)
    split.step = 0
    whole = [numbers["loss"] for numbers in steps(unsplit)]
    assert [numbers["loss"] for numbers in steps(split)] == whole
    assert len(whole) > 3


def test_timesteps_of_a_bf16_run_reach_the_denoiser_in_fp32(
    config: TrainConfig,
) -> None:
    ready = training_run(having(config, mixed_precision="bf16"))
    seen: list[Tensor] = []
    embed = ready.module.pipeline.components["dit"].time_text_embed.time_proj
    embed.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    next(steps(ready))
    assert [value.dtype for value in seen] == [torch.float32]
    assert (seen[0] * 1000).bfloat16() != seen[0] * 1000


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_lora_trained_here_gives_the_same_latents_in_diffusers_at_each_step(
    scale: float, config: TrainConfig, toy_folder: Path, tmp_path: Path
) -> None:
    with torch.enable_grad():
        run(having(config, dataset_repeat=3, **TRAINED["LoRA"]))
    file = tmp_path / "out/epoch-0.safetensors"
    noise = torch.randn(1, 16, 1, 8, 12, generator=torch.Generator().manual_seed(5))
    size = {"height": 64, "width": 96, "num_inference_steps": 4}
    theirs: list[Tensor] = []
    published = QwenImagePipeline.from_pretrained(toy_folder)
    published.set_progress_bar_config(disable=True)
    published.load_lora_weights(file)
    published(
        prompt="a dog",
        negative_prompt="bad",
        true_cfg_scale=scale,
        latents=pack(noise),
        callback_on_step_end=add_to(theirs),
        **size,
    )
    images = {}
    for loras in ((), (file,)):
        ours: list[Tensor] = []
        files = [ModelConfig(path=weights(toy_folder, part)) for part in PARTS]
        pipe = Pipeline.from_pretrained("qwen_image", files, "base")
        for lora in loras:
            pipe.load_lora(lora)
        arguments = {
            "prompt": "a dog",
            "negative_prompt": "bad",
            "guidance_scale": scale,
            "latents": noise,
            **size,
        }
        pipe(
            **arguments,
            on_step=lambda i, latents, seen=ours: seen.append(pack(latents)),
        )
        images[bool(loras)] = ours
    assert_equal_steps(images[True], theirs, 4)
    assert (images[False][-1] - theirs[-1]).abs().max() > 1e-2


def test_a_saved_text_encoder_is_loaded_by_itself_and_trained_on(
    config: TrainConfig, toy_folder: Path, tmp_path: Path
) -> None:
    flags = having(config, max_steps=2, **TRAINED["text_encoder and LoRA"])
    run(flags)
    saved = tmp_path / "out/step-2.text_encoder.safetensors"
    alone = tmp_path / "alone.safetensors"
    shutil.copy(saved, alone)
    paths = [weights(toy_folder, "transformer"), str(alone), weights(toy_folder, "vae")]
    again = having(flags, model_paths=json.dumps(paths), output_path=tmp_path / "again")
    loaded = training_run(again).module.pipeline.components["text_encoder"]
    module = training_run(flags).module.pipeline.components["text_encoder"]
    published = load_file(saved)
    assert set(published) == set(load_file(weights(toy_folder, "text_encoder")[0]))
    assert loaded.state_dict().keys() == module.state_dict().keys()
    moved = [
        n
        for n, value in loaded.state_dict().items()
        if not torch.equal(value, module.state_dict()[n])
    ]
    assert len(moved) > 20
    assert not any(name.startswith(("lm_head", "model.visual")) for name in moved)
    run(again)
    lora = load_file(tmp_path / "out/step-2.dit.safetensors")
    assert all(name.startswith("transformer.") for name in lora)


@pytest.mark.drawn  # test_two_processes trains each family so without a launcher
def test_two_processes_train_as_one_at_the_same_global_batch(
    config: TrainConfig, toy_folder: Path, data: Path, tmp_path: Path
) -> None:
    common = {
        "learning_rate": 1e-2,
        "num_epochs": 2,
        "lora_rank": 4,
        "lr_scheduler": "cosine",
    }
    run(
        having(
            config,
            gradient_accumulation_steps=4,
            output_path=tmp_path / "one",
            **common,
        )
    )
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 -m dstrain".split()
    flags = {"model": "qwen_image", "dataset_base_path": data, "gradient_accumulation_steps": 2, **common,
             "output_path": tmp_path / "two",
             "model_paths": json.dumps([weights(toy_folder, part) for part in PARTS])}  # fmt: skip
    command += [
        word for name, value in flags.items() for word in (f"--{name}", str(value))
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes" in done.stderr
    one, two = log(tmp_path / "one"), log(tmp_path / "two")
    assert len(one) == 2 * 2
    for a, b in zip(one, two, strict=True):
        assert a[:3] == b[:3]
        assert [float(x) for x in a[3:]] == pytest.approx(
            [float(x) for x in b[3:]], rel=2e-5
        )
    for epoch in range(2):
        files = [
            load_file(tmp_path / way / f"epoch-{epoch}.safetensors")
            for way in ("one", "two")
        ]
        assert files[0].keys() == files[1].keys()
        assert (
            max((files[0][key] - files[1][key]).abs().max().item() for key in files[0])
            <= 1e-5
        )


def test_the_toys_weights_depend_on_nothing_but_its_seed(
    config: TrainConfig, toy_folder: Path, tmp_path: Path
) -> None:
    run(
        having(
            config,
            model_paths=None,
            toy=True,
            output_path=tmp_path / "toy",
            max_steps=1,
        )
    )
    run(having(config, output_path=tmp_path / "files", max_steps=1))
    assert same(
        *(load_file(tmp_path / way / "step-1.safetensors") for way in ("toy", "files"))
    )
    write(tmp_path / "again")
    for part in PARTS:
        for one, other in zip(
            weights(toy_folder, part), weights(tmp_path / "again", part), strict=True
        ):
            assert Path(one).read_bytes() == Path(other).read_bytes()


def test_a_text_encoder_that_was_trained_in_full_is_used_again(
    config: TrainConfig, tmp_path: Path
) -> None:
    # Its files have other key names than the network in memory.
    trained = having(config, trainable_models="text_encoder", max_steps=1)
    run(trained)
    weights_file = tmp_path / "out/step-1.safetensors"
    second = {"resume_from_checkpoint": weights_file}
    run(having(trained, output_path=tmp_path / "second", **second))
    generate(
        GenerateConfig(
            model="qwen_image",
            run=tmp_path / "out",
            prompt="dog",
            output=tmp_path / "a.png",
            height=32,
            width=32,
            num_inference_steps=1,
        )
    )
    assert (tmp_path / "a.png").is_file()
