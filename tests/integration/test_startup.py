"""A run imports what it uses: a feature cache that is complete needs no classes of
networks, and stage 2 of a LoRA none of an encoder.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain.models import write_toy
from dstrain.registry import load_family
from PIL import Image

UNUSED = frozenset(
    {
        "av",
        "bitsandbytes",
        "diffusers.pipelines",
        "modelscope",
        "pandas",
        "sklearn",
        "torchao",
        "torchvision",
    }
)
"""What no run on images uses that neither downloads nor quantizes."""
ENCODERS = frozenset(
    {
        "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
        "transformers.models.qwen2.tokenization_qwen2",
        "transformers.models.qwen2_5_vl",
    }
)
NETWORKS = ENCODERS | {
    "diffusers",
    "huggingface_hub",
    "peft",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers",
}
CODE = """
import sys
from dstrain.cli.main import main
code = main(sys.argv[1:])
print(*sys.modules)
raise SystemExit(code)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """The flags of a run, in whose folder the feature cache is complete."""
    with chdir(tmp_path_factory.mktemp("startup")):
        Path("data").mkdir()
        Image.new("RGB", (32, 32)).save("data/a.png")
        Path("data/metadata.csv").write_text("image,prompt\na.png,a square\n")
        models = write_toy(load_family("qwen_image"), "base", Path("model"))
        flags = (
            *("--model", "qwen_image", "--lora_base_model", "dit"),
            *("--model_paths", json.dumps([one.path for one in models])),
            *("--tokenizer_path", "model/tokenizer", "--dataset_base_path", "data"),
            *("--dataset_metadata_path", "data/metadata.csv"),
            *("--feature_cache", "cache"),
        )
        assert main([*flags, "--task", "sft:data_process"]) == 0
        yield flags


@pytest.mark.parametrize(
    ("stage", "unused"),
    [
        pytest.param(("sft:data_process",), NETWORKS, id="stage 1, complete"),
        pytest.param(
            ("sft:train", "--output_path", "out", "--max_steps", "1"),
            ENCODERS,
            id="stage 2 of a LoRA",
        ),
    ],
)
def test_a_run_imports_what_it_uses(
    filled: tuple[str, ...], stage: tuple[str, ...], unused: frozenset[str]
) -> None:
    command = (sys.executable, "-c", CODE, *filled, "--task", *stage)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = {*done.stdout.split()}
    assert "dstrain.runs.runner" in imported
    assert not imported & (UNUSED | unused)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("wan", "--model wan"),
        ("wan", "--model_id Wan-AI/Wan2.1-T2V-14B"),
        ("wan", "--recipe wan-style-24gb"),
        ("flux2", "--model_id black-forest-labs/FLUX.2-dev -p no:flux"),
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_family_that_is_absent_is_named_with_how_to_have_it(
    plugin: str,
    words: str,
    is_there: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    advice = ", which -p disables" if is_there else ": in the folder of the project"
    advice = f"plugin-{plugin}{advice}"
    monkeypatch.setattr(
        "dstrain.installed._is_there", lambda _, off=(): is_there and plugin not in off
    )
    assert main(["train", "-p", f"no:{plugin}", *words.split(), "--dry_run"]) == 2
    assert advice in " ".join(capsys.readouterr().err.split())
