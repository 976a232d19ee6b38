"""`dstrain caption` writes what is missing, file by file, and says the rest."""

import errno
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from dstrain import SystemFault
from dstrain.cli.main import main
from dstrain.data.forms.folder import read_folder
from dstrain_tools.captioning import captioner as module, run
from dstrain_wan.toy import write as write_wan
from PIL import Image

from tests.support.videos import film, steady

Toy = Callable[[str], Path]
NAMES = ("beach/sea", "cat", "dog")
TEXTS = {"beach/sea.webp": "the sea", "cat.png": "a cat", "dog.jpg": "a  dog\n"}


class Writer:
    """Stands for a model: writes what `texts` says of an image."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.batches: list[list[str]] = []
        self.refused: set[str] = set()
        self.error: BaseException | None = None

    def write(
        self, shown: Sequence[Sequence[Image.Image]], names: Sequence[str]
    ) -> list[str]:
        if self.error is not None and self.batches:
            raise self.error
        self.batches.append(list(names))
        if self.refused.intersection(names):
            raise ValueError("the aspect ratio is too large\nmore")
        return [self.texts[name] for name in names]


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch, photos: Path) -> Writer:
    """The model of every command."""
    fake = Writer(dict(TEXTS))
    monkeypatch.setattr(module, "load_captioner", lambda *_: fake)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    return fake


def caption(*words: str) -> int:
    return main(["caption", "photos", "--model_id", "model", *words])


def captions(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text()
        for path in sorted(folder.rglob("*.txt"))
    }


def test_a_toy_model_writes_captions_that_datasets_read_and_training_uses(
    toy: Toy, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(toy("qwen"))
    words = ["--max-new-tokens", "40", "--trigger_word", "sks", "--device", "cpu"]
    assert main(["caption", "photos", "--model_id", model, *words]) == 0
    rows = read_folder(photos, None, None).rows
    assert [row["text"][:5] for row in rows] == ["sks, "] * 3
    *_, last = capsys.readouterr().err.splitlines()
    # The command that is shown is typed.
    program, *command = shlex.split(last.removeprefix("train on them: "))
    assert program == "dstrain"
    small = ["--max_steps", "1", "--lora_rank", "2"]
    assert main([*command, *small]) == 0
    assert list(Path("out").rglob("*.safetensors"))


def test_each_image_gets_a_file_beside_it(writer: Writer, photos: Path) -> None:
    assert caption() == 0
    assert captions(photos) == {
        "beach/sea": "the sea\n",
        "cat": "a cat\n",
        "dog": "a dog\n",
    }
    assert writer.batches == [[name] for name in TEXTS]


def test_a_caption_that_somebody_writes_meanwhile_is_kept(
    writer: Writer,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write(shown: object, names: Sequence[str]) -> list[str]:
        (photos / "cat.txt").write_text("mine")
        return [TEXTS[name] for name in names]

    monkeypatch.setattr(writer, "write", write)
    assert caption("--batch_size", "3") == 2
    assert "cat.png: got a caption meanwhile, which is kept" in capsys.readouterr().err
    assert captions(photos)["cat"] == "mine" and len(captions(photos)) == 3
    assert caption("--overwrite", "--batch_size", "3") == 0
    assert captions(photos)["cat"] == "a cat\n"


def test_a_caption_that_cannot_be_written_costs_no_other(
    writer: Writer,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (photos / "beach/sea.txt").mkdir()

    def write(shown: object, names: Sequence[str]) -> list[str]:
        # Meanwhile it is made.
        (photos / "cat.txt").mkdir()
        return [TEXTS[name] for name in names]

    monkeypatch.setattr(writer, "write", write)
    assert caption("--batch_size", "3") == 2
    assert (photos / "dog.txt").read_text() == "a dog\n"
    said = capsys.readouterr().err
    assert "2 images and videos have no new caption" in said
    assert "beach/sea.webp: its caption would be sea.txt, which is a folder" in said
    assert "cat.png: its caption cannot be written: Is a directory" in said


def test_a_full_disk_ends_the_command(
    writer: Writer, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        cause = OSError(errno.ENOSPC, "No space left on device")
        raise SystemFault(path, "cannot be written") from cause

    monkeypatch.setattr(run, "write_file", fail)
    assert caption() == SystemFault.exit_code
    assert len(writer.batches) == 1


def test_videos_are_captioned_and_wan_is_trained_on_them(
    toy: Toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my videos").mkdir()
    film(Path("my videos/a.mp4"), steady(10, 16))
    write_wan(Path("toys/Wan-AI/Wan2.1-T2V-1.3B"), "t2v")
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", "toys")
    model = str(toy("blip"))
    assert main(["caption", "my videos", "--model_id", model, "--device", "cpu"]) == 0
    *_, last = capsys.readouterr().err.splitlines()
    command = shlex.split(last.removeprefix("train on them: dstrain "))
    small = ["--num_frames", "5", "--max_pixels", "4096", "--dry_run"]
    assert main([*command, *small]) == 0


@pytest.mark.parametrize(
    ("index", "trained"),
    (
        ('{"_class_name": "QwenImagePipeline"}', "model"),
        # It needs images to edit.
        ('{"_class_name": "QwenImageEditPipeline"}', "Qwen/Qwen-Image"),
        ("[]", "Qwen/Qwen-Image"),
        ("", "Qwen/Qwen-Image"),
    ),
)
def test_the_model_that_is_trained_needs_nothing_but_captions(
    writer: Writer, capsys: pytest.CaptureFixture[str], index: str, trained: str
) -> None:
    Path("model/text_encoder").mkdir()
    Path("model/config.json").rename("model/text_encoder/config.json")
    Path("model/tokenizer").mkdir()
    Path("model/model_index.json").write_text(index)
    assert caption() == 0
    assert f"train on them: dstrain --model_id {trained} " in capsys.readouterr().err


def test_captions_are_kept_and_replaced_only_when_told(
    writer: Writer, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "cat.txt").write_text("my cat")
    assert caption() == 0
    assert captions(photos)["cat"] == "my cat"
    said = capsys.readouterr().err
    assert "2 images and videos to caption; 1 has a caption already" in said
    assert caption() == 0
    assert len(writer.batches) == 2
    assert caption("--overwrite", "--batch_size", "3") == 0
    assert captions(photos)["cat"] == "a cat\n"


def test_a_broken_image_is_named_and_the_others_are_captioned(
    writer: Writer, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "cat.png").write_bytes((photos / "cat.png").read_bytes()[:60])
    assert caption("--batch_size", "3") == 2
    assert set(captions(photos)) == {"beach/sea", "dog"}
    assert writer.batches == [["beach/sea.webp", "dog.jpg"]]
    said = capsys.readouterr().err
    assert "dstrain: error: photos: 1 image or video has no new caption" in said
    assert "\n  cat.png: is truncated" in said
    assert "train on them" not in said


def test_an_image_that_the_processor_refuses_does_not_cost_its_batch(
    writer: Writer, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer.refused = {"cat.png"}
    assert caption("--batch_size", "3") == 2
    assert set(captions(photos)) == {"beach/sea", "dog"}
    said = capsys.readouterr().err
    assert "cat.png: the model refuses it: the aspect ratio" in said


def test_an_empty_answer_is_no_caption(
    writer: Writer, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer.texts["cat.png"] = " \n"
    assert caption("--trigger_word", "sks") == 2
    assert set(captions(photos)) == {"beach/sea", "dog"}
    assert "cat.png: the model wrote no caption" in capsys.readouterr().err


def test_an_interrupted_command_resumes_where_it_was(
    writer: Writer, photos: Path
) -> None:
    writer.error = KeyboardInterrupt()
    assert caption() == 75
    assert list(captions(photos)) == ["beach/sea"]
    writer.error = None
    assert caption() == 0
    assert writer.batches == [[name] for name in TEXTS]
    assert not list(photos.rglob(".tmp*"))


@pytest.mark.parametrize(
    ("error", "code"),
    ((MemoryError(), 6), (RuntimeError("CUDA out of memory. Tried"), 6)),
)
def test_running_out_of_memory_is_said_with_what_helps(
    writer: Writer,
    photos: Path,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    writer.error = error
    assert caption() == code
    said = capsys.readouterr().err
    assert "dstrain: error: captioning: out of memory" in said
    assert "--quantize bitsandbytes_nf4" in said
    assert list(captions(photos)) == ["beach/sea"]


def test_a_dry_run_lists_what_would_be_captioned_and_imports_no_torch(
    photos: Path,
) -> None:
    (photos / "cat.txt").write_text("my cat")
    code = (
        "import sys; sys.modules['torch'] = None; from dstrain.cli.main import main; "
        "sys.exit(main(['caption', 'photos', '--dry_run']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "beach/sea.webp\ndog.jpg\n")
    assert captions(photos) == {"cat": "my cat"}


def test_nothing_left_to_do_needs_no_model(photos: Path) -> None:
    for name in NAMES:
        (photos / f"{name}.txt").write_text("x")
    assert main(["caption", "photos", "--model_id", "absent"]) == 0


def test_metadata_in_the_folder_is_warned_of(
    writer: Writer, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "metadata.csv").write_text("image,prompt\ncat.png,x\n")
    assert caption() == 0
    said = capsys.readouterr().err
    assert "photos/metadata.csv: datasets with metadata are read from there" in said
    assert "train on them once metadata.csv is moved away: dstrain " in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    (
        (["caption"], 2, "dstrain: error: command line: missing"),
        (["caption", "nowhere"], 2, "dstrain: error: nowhere: does not exist"),
        (["caption", "photos", "--batch_size", "0"], 2, "--batch_size: "),
        (["caption", "photos", "--model_id", "nowhere"], 3, "nowhere: does not exist"),
        (["caption", "photos", "--model_id", "other"], 2, "no image-to-text model"),
        (["caption", "photos", "--quantize", "nf4"], 2, "--quantize: "),
        (["caption", "photos", "--temperature", "nan"], 2, "--temperature: expected a"),
        (["caption", "photos", "--temperature", "inf"], 2, "--temperature: expected a"),
        (["caption", "photos", "--seed", "1"], 2, "--seed: has no effect without"),
    ),
)
def test_what_is_wrong_is_said_in_one_line_with_its_exit_code(
    photos: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    said: str,
) -> None:
    Path("other").mkdir()
    Path("other/config.json").write_text(json.dumps({"model_type": "bert"}))
    assert main(words) == code
    assert said in capsys.readouterr().err
    assert captions(photos) == {}


def test_many_broken_images_are_counted(
    writer: Writer, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        (photos / f"n{number}.png").write_bytes(b"no image")
    assert caption() == 2
    said = capsys.readouterr().err
    assert "30 images and videos have no new caption" in said
    assert "\n  and 10 more\n" in said
