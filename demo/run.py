"""`make demo`: trains a small Qwen-Image on handwritten digits in two stages, then a
LoRA of a new look, and judges it.

Every command is printed before it runs and can be typed by hand, from the project's
folder.
"""

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

OUT = Path("demo_output")
MODEL = OUT / "model"
FULL_STEPS, LORA_STEPS = 500, 250
LOOK = ", red ink on yellow paper"


def main() -> None:
    """Run the demo from the beginning; what an earlier one wrote is removed."""
    start = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    print(
        f"to type these commands by hand: . {Path(sys.prefix).name}/bin/activate",
        flush=True,
    )
    for command in commands():
        print("\n$ " + shlex.join(command), flush=True)
        done = subprocess.run([executable(command[0]), *command[1:]])
        if done.returncode:
            # The command has said why.
            sys.exit(done.returncode)
    print(f"\nlook at {OUT / 'grid.png'} ({time.monotonic() - start:.0f} s)")


def executable(name: str) -> str:
    """Python, or a command of this environment."""
    return (
        sys.executable
        if name == "python"
        else str(Path(sysconfig.get_path("scripts")) / name)
    )


def commands() -> list[list[str]]:
    """Return the commands of the demo, in order."""
    encoders = [
        str(MODEL / "text_encoder/model.safetensors"),
        str(MODEL / "vae/diffusion_pytorch_model.safetensors"),
    ]
    shards = [
        str(MODEL / f"transformer/diffusion_pytorch_model-0000{i}-of-00002.safetensors")
        for i in (1, 2)
    ]
    full, lora = (
        OUT / f"full/step-{FULL_STEPS}.safetensors",
        OUT / f"lora/step-{LORA_STEPS}.safetensors",
    )
    train = ["dstrain", "--model", "qwen_image", "--feature_cache", str(OUT / "cache")]
    on_digits = [
        *train,
        "--dataset_base_path",
        str(OUT / "digits"),
        "--model_paths",
        json.dumps([shards, *encoders]),
        "--trainable_models",
        "dit",
        "--learning_rate",
        "1e-3",
        "--batch_size",
        "64",
        "--lr_scheduler",
        "cosine",
        "--lr_warmup_steps",
        "50",
        "--loss_weighting",
        "none",
        "--max_steps",
        str(FULL_STEPS),
        "--save_steps",
        str(FULL_STEPS),
        "--output_path",
        str(OUT / "full"),
    ]
    on_look = [
        *train,
        "--dataset_base_path",
        str(OUT / "look"),
        "--model_paths",
        json.dumps([str(full), *encoders]),
        "--lora_base_model",
        "dit",
        "--lora_rank",
        "16",
        "--learning_rate",
        "2e-3",
        "--batch_size",
        "32",
        "--loss_weighting",
        "none",
        "--max_steps",
        str(LORA_STEPS),
        "--save_steps",
        str(LORA_STEPS),
        "--output_path",
        str(OUT / "lora"),
    ]
    images = ["python", "demo/images.py", str(MODEL), str(full)]
    return [
        ["python", "demo/digits.py", "data", str(OUT / "digits")],
        ["python", "demo/digits.py", "look", str(OUT / "look")],
        ["python", "demo/model.py", str(MODEL)],
        [*on_digits, "--task", "sft:data_process"],
        [*on_digits, "--task", "sft:train"],
        [*on_look, "--task", "sft:data_process"],
        [*on_look, "--task", "sft:train"],
        [*images, str(OUT / "plain")],
        [*images, str(OUT / "restyled"), "--lora", str(lora), "--words", LOOK],
        [
            "python",
            "demo/digits.py",
            "judge",
            "--least",
            "0.9",
            str(OUT / "grid.png"),
            str(OUT / "plain"),
            str(OUT / "restyled"),
        ],
    ]


if __name__ == "__main__":
    main()
