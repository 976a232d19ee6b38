"""`dstrain caption` writes what is missing, file by file, and says the rest."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain.cli.main import main
from PIL import Image

from tests.support.toys import toy as family_toy
from tests.support.videos import film, seconds, steady

Toy = Callable[[str], Path]
NAMES = ["beach/sea.webp", "cat.png", "dog.jpg"]
Said = pytest.CaptureFixture[str]


def caption(words: str = "") -> int:
    return main(["caption", "photos", "--model_id", "model", *shlex.split(words)])


def captions(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text()
        for path in sorted(folder.rglob("*.txt"))
    }


def faults(said: Said) -> dict[str, str]:
    """Return what has no caption, and why."""
    return dict(re.findall(r"^  (\S+): (.*)$", said.readouterr().err, re.MULTILINE))


def training_command(said: str) -> list[str]:
    """Return the words of the command that is shown."""
    (command,) = re.findall(r"dstrain (--model_id .*)$", said, re.MULTILINE)
    return shlex.split(command)


def test_a_toy_model_writes_captions_that_training_uses(
    toy: Toy, photos: Path, capsys: Said
) -> None:
    words = f"--model_id {toy('qwen')} --max-new-tokens 40 --trigger_word sks"
    assert main(["caption", "photos", *words.split(), "--device", "cpu"]) == 0
    written = captions(photos)
    assert written.keys() == {"beach/sea", "cat", "dog"}
    assert all(text.startswith("sks, ") for text in written.values())
    command = training_command(capsys.readouterr().err)
    assert main([*command, "--max_steps", "1", "--lora_rank", "2"]) == 0
    assert list(Path("out").rglob("*.safetensors"))


def test_videos_are_captioned_and_wan_is_trained_on_them(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my videos").mkdir()
    film(Path("my videos/a.mp4"), steady(10, 16))
    shutil.copytree(family_toy("wan", "t2v"), "toys/Wan-AI/Wan2.1-T2V-1.3B")
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", "toys")
    model = str(toy("blip"))
    assert main(["caption", "my videos", "--model_id", model, "--device", "cpu"]) == 0
    command = training_command(capsys.readouterr().err)
    small = ["--num_frames", "5", "--max_pixels", "4096", "--dry_run"]
    assert main([*command, *small]) == 0


def test_images_and_videos_are_found_in_all_folders_and_trained_on_as_images(
    writer: Any, photos: Path, capsys: Said
) -> None:
    film(photos / "below.MP4", steady(10, 4))
    for name in ("note.md", ".hidden.png"):
        (photos / name).touch()
    assert caption() == 0
    assert writer.batches == [[name] for name in sorted(["below.MP4", *NAMES])]
    assert training_command(capsys.readouterr().err)[1] == "Qwen/Qwen-Image"
    assert caption("--overwrite -p no:qwen_image") == 0
    assert "--model_id" not in capsys.readouterr().err


@pytest.mark.parametrize("ending", (".txt", ".caption"))
def test_a_caption_is_kept_unless_it_is_to_be_replaced(
    ending: str, writer: Any, photos: Path, capsys: Said
) -> None:
    own = photos / f"cat{ending}"
    own.write_text("my cat")
    assert caption() == 0
    assert own.read_text() == "my cat"
    assert "2 images" in capsys.readouterr().err
    assert caption() == 0
    assert len(writer.batches) == 2
    assert caption("--overwrite --batch_size 3") == 0
    # In the same file: two captions of one image would be refused.
    assert own.read_text() == "a cat\n"
    assert (photos / "cat.txt").exists() is (ending == ".txt")


@pytest.mark.parametrize(
    ("words", "files", "named"),
    [
        (
            "--overwrite",
            {"cat.json": b'{"caption": "a cat", "camera": "x"}'},
            {"cat.png": "cat.json"},
        ),
        ("", {"cat.txt": b"caf\xe9"}, {"cat.png": "cat.txt"}),
        ("", {"cat.webp": b""}, {"cat.png": "cat.webp", "cat.webp": "cat.png"}),
        (
            "--overwrite",
            {"cat.txt": b"a cat", "cat.caption": b"a cat"},
            {"cat.png": "cat.txt and cat.caption"},
        ),
    ],
    ids=["in JSON", "not to be read", "of two images", "of one image twice"],
)
def test_a_caption_that_cannot_be_kept_or_replaced_is_named(
    words: str,
    files: dict[str, bytes],
    named: dict[str, str],
    writer: Any,
    photos: Path,
    capsys: Said,
) -> None:
    for name, content in files.items():
        (photos / name).write_bytes(content)
    assert caption(words) == 2
    found = faults(capsys)
    assert found.keys() == named.keys()
    assert all(named[name] in found[name] for name in named)
    assert writer.batches == [["beach/sea.webp"], ["dog.jpg"]]


def test_a_caption_in_json_counts_and_one_that_cannot_be_read_may_be_replaced(
    writer: Any, photos: Path
) -> None:
    (photos / "cat.json").write_text('{"caption": "a cat"}')
    (photos / "dog.txt").symlink_to("nowhere")
    assert caption("--overwrite") == 2
    assert captions(photos)["dog"] == "a dog\n"
    assert caption() == 0
    assert "cat" not in captions(photos)


def test_a_caption_that_cannot_be_written_is_known_before_and_costs_no_other(
    writer: Any, photos: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "beach" and real(path, mode)
    )
    (photos / "cat.txt").mkdir()
    assert caption() == 2
    assert writer.batches == [["dog.jpg"]]
    assert (photos / "dog.txt").read_text() == "a dog\n"
    found = faults(capsys)
    assert found.keys() == {"beach/sea.webp", "cat.png"}
    assert "cat.txt" in found["cat.png"]


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
    index: str, trained: str, writer: Any, capsys: Said
) -> None:
    Path("model/text_encoder").mkdir()
    Path("model/config.json").rename("model/text_encoder/config.json")
    Path("model/tokenizer").mkdir()
    Path("model/model_index.json").write_text(index)
    assert caption() == 0
    assert training_command(capsys.readouterr().err)[1] == trained


def test_a_broken_image_is_named_and_the_others_are_captioned(
    writer: Any, photos: Path, capsys: Said
) -> None:
    (photos / "cat.png").write_bytes((photos / "cat.png").read_bytes()[:60])
    assert caption("--batch_size 3") == 2
    assert set(captions(photos)) == {"beach/sea", "dog"}
    assert writer.batches == [["beach/sea.webp", "dog.jpg"]]
    ((name, what),) = faults(capsys).items()
    assert name == "cat.png" and name not in what


@pytest.mark.parametrize("text", ["", " \n\t", "\x00", "\ufffd", "a \ud800 cat"])
def test_an_answer_without_text_is_no_caption(
    text: str, writer: Any, photos: Path, capsys: Said
) -> None:
    writer.texts["cat.png"] = text
    assert caption("--trigger_word sks") == 2
    assert set(captions(photos)) == {"beach/sea", "dog"}
    assert faults(capsys).keys() == {"cat.png"}


@pytest.mark.parametrize(
    ("text", "written"),
    (
        ("  A cat.\n\n\tIt\u3000sleeps. \x00\x1b", "in oil, sks, A cat. It sleeps.!"),
        # Half a character at the end.
        ("a caf\ufffd", "in oil, sks, a caf!"),
        ("a cat", "in oil, sks, a cat!"),
        ("a sks cat", "in oil, a sks cat!"),
        ("a skset cat", "in oil, sks, a skset cat!"),
    ),
)
def test_a_caption_is_one_line_with_the_trigger_word_once_inside_prefix_and_suffix(
    text: str, written: str, writer: Any, photos: Path
) -> None:
    writer.texts["cat.png"] = text
    around = "--caption_prefix 'in oil, ' --caption_suffix '!'"
    assert caption(f"--trigger_word sks {around}") == 0
    assert captions(photos)["cat"] == f"{written}\n"


def test_an_interrupted_command_resumes_where_it_was(writer: Any, photos: Path) -> None:
    def interrupt() -> None:
        if writer.batches:
            raise KeyboardInterrupt

    writer.before = interrupt
    assert caption() == 75
    assert list(captions(photos)) == ["beach/sea"]
    writer.before = lambda: None
    assert caption() == 0
    assert writer.batches == [[name] for name in NAMES]
    assert not list(photos.rglob(".tmp*"))


@pytest.mark.parametrize(
    "error", (MemoryError(), RuntimeError("CUDA out of memory. Tried"))
)
def test_running_out_of_memory_is_said_with_what_helps(
    error: Exception, writer: Any, photos: Path, capsys: Said
) -> None:
    def fail() -> None:
        if writer.batches:
            raise error

    writer.before = fail
    assert caption() == 6
    assert "--quantize bitsandbytes_nf4" in capsys.readouterr().err
    assert list(captions(photos)) == ["beach/sea"]


def test_a_dry_run_lists_what_would_be_captioned_and_imports_no_torch(
    photos: Path,
) -> None:
    (photos / "cat.txt").write_text("my cat")
    (photos / "dog.jpg").rename(photos / "dog\n.jpg")
    code = (
        "import sys; sys.modules['torch'] = None; from dstrain.cli.main import main; "
        "sys.exit(main(['caption', 'photos', '--dry_run']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "beach/sea.webp\n'dog\\n.jpg'\n")
    assert captions(photos) == {"cat": "my cat"}


def test_metadata_in_the_folder_is_warned_of(
    writer: Any, photos: Path, capsys: Said
) -> None:
    (photos / "metadata.csv").write_text("image,prompt\ncat.png,x\n")
    assert caption() == 0
    said = capsys.readouterr().err
    assert "warning: photos/metadata.csv: " in said
    assert training_command(said)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    (
        ("", 2, "command line: "),
        ("nowhere", 2, "nowhere: "),
        ("model.txt", 2, "model.txt: "),
        ("empty", 2, "photo.heic"),
        ("photos --batch_size 0", 2, "--batch_size: "),
        ("photos --model_id nowhere", 3, "nowhere: "),
        ("photos --model_id other", 2, "'bert'"),
        ("photos --quantize nf4", 2, "--quantize: "),
        ("photos --temperature nan", 2, "--temperature: "),
        ("photos --temperature inf", 2, "--temperature: "),
        ("photos --seed 0", 2, "--seed: "),
    ),
)
def test_what_is_wrong_is_said_with_its_exit_code(
    words: str, code: int, said: str, photos: Path, capsys: Said
) -> None:
    for name in ("other", "empty"):
        Path(name).mkdir()
    Path("other/config.json").write_text(json.dumps({"model_type": "bert"}))
    Path("empty/photo.heic").touch()
    Path("model.txt").touch()
    assert main(["caption", *words.split()]) == code
    assert said in capsys.readouterr().err
    assert captions(photos) == {}


def test_transparent_parts_are_white_and_an_image_is_shown_upright(
    writer: Any, photos: Path
) -> None:
    image = Image.new("RGBA", (40, 20), (255, 0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(photos / "cat.png", exif=exif)
    assert caption() == 0
    (shown,) = writer.shown["cat.png"]
    assert (shown.mode, shown.size) == ("RGB", (20, 40))
    assert shown.getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize(
    ("length", "most", "frames"),
    [(1, 8, [0]), (3, 8, [0, 1, 2]), (30, 4, [3, 11, 18, 26])],
)
def test_of_a_video_frames_from_the_middle_of_equal_parts_share_the_pixels(
    length: int, most: int, frames: list[int], writer: Any, photos: Path
) -> None:
    film(photos / "a.mp4", steady(length, 10))
    assert caption(f"--num_frames {most} --max_pixels {10**8}") == 0
    shown = [np.asarray(image) for image in writer.shown["a.mp4"]]
    times = seconds(np.stack(shown))
    assert times == pytest.approx([frame / 10 for frame in frames], abs=0.15)
    height, width, _ = shown[0].shape
    small = len(frames) * height * width // 4
    assert caption(f"--overwrite --num_frames {most} --max_pixels {small}") == 0
    assert writer.shown["a.mp4"][0].size == (width // 2, height // 2)
