"""R7: bad input is named. Each case is a bad dataset, given to the command line."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain.cli.main import main
from PIL import Image

from tests.support import broad_family
from tests.support.bad_files import (
    NOISE,
    cut,
    encoded,
    film,
    frames,
    huge_png,
    hurt,
    part,
    sound,
)

pytestmark = pytest.mark.promise(
    "R7", "bad input is named: file:row:column, exit 2, all bad rows at once"
)

Content = str | bytes | Image.Image | list[Any] | Callable[[Path], Any]


def last(line: str, count: int) -> str:
    """Rows of a csv: good ones, and this one in between."""
    return "image,prompt\n" + "good.png,a\n" * (count - 2) + line + "\ngood.png,b\n"


@dataclass(frozen=True)
class Case:
    """A bad dataset: its metadata, files beside it, and what is said.

    places: the rows or cells named, as line:column; without them the first line names
    the file. words: in what is said. flags: of the command line. at_once: named before
    anything is decoded, all together; else met at decoding.
    """

    name: str
    metadata: Content
    places: tuple[str, ...]
    words: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)
    kind: str = "csv"
    flags: tuple[str, ...] = ()
    at_once: bool = True


def image_case(name: str, content: Content, *words: str, **more: Any) -> Case:
    """A case of one bad image in two of four rows."""
    metadata = "image,prompt\ngood.png,a\nbad.png,b\ngood.png,c\nbad.png,d\n"
    return Case(
        name,
        metadata,
        more.pop("places", ("3:image", "5:image")),
        words,
        {"bad.png": content},
        **more,
    )


def video(name: str, content: Content, *words: str, file: str = "bad.mp4") -> Case:
    """A case of one bad video in the first of two rows."""
    return Case(
        name,
        f"image,prompt,clip\ngood.png,a,{file}\ngood.png,b,good.mp4\n",
        ("2:clip",),
        words,
        {file: content},
    )


def mask_case(name: str, content: Content, *words: str, **more: Any) -> Case:
    """A case of one bad mask in two of five rows; one row has none."""
    rows = "good.png,a,bad.png\ngood.png,b,good.png\n"
    return Case(
        name,
        f"image,prompt,shape\n{2 * rows}good.png,c,\n",
        more.pop("places", ("2:shape", "4:shape")),
        words,
        {"bad.png": content},
        flags=("--mask_column", "shape", *more.pop("flags", ())),
        **more,
    )


def other_dataset(folder: Path) -> None:
    """A dataset with two bad rows of three."""
    folder.mkdir()
    (folder / "good.png").write_bytes(encoded("PNG"))
    rows = "none.png,a\ngood.png,b\nnone.png,c\n"
    (folder / "metadata.csv").write_text(f"image,prompt\n{rows}")


def other_metadata(folder: Path) -> None:
    """A folder with metadata alone."""
    folder.mkdir()
    (folder / "metadata.csv").write_text("image,prompt\ngood.png,a\n")


def masked_dataset(rows: str) -> Callable[[Path], None]:
    """Return what writes another dataset, with these rows of image, caption and mask."""

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "good.png").write_bytes(encoded("PNG"))
        black = encoded("PNG", Image.new("L", (64, 64)))
        (folder / "black.png").write_bytes(black)
        (folder / "metadata.csv").write_text(f"image,prompt,outline\n{rows}")

    return write


def masks_of_other(name: str, rows: str, *words: str, **more: Any) -> Case:
    """A case of a good dataset with masks, and another with masks of its own."""
    own = {"dataset_base_path": "data/more", "mask_column": "outline"}
    return Case(
        name,
        "image,prompt,shape\ngood.png,a,good.png\n",
        more.pop("places", ()),
        words,
        {"more": masked_dataset(rows)},
        flags=("--mask_column", "shape", "--dataset", json.dumps(own)),
        **more,
    )


def table(
    name: str,
    places: tuple[str, ...],
    words: tuple[str, ...],
    *records: Any,
    kind: str = "json",
) -> Case:
    """A case whose metadata is json, with these records."""
    lines = [json.dumps(family) for family in records]
    return Case(
        name,
        "\n".join(lines) if kind == "jsonl" else f"[{', '.join(lines)}]",
        places,
        words,
        kind=kind,
    )


GOOD = {"image": "good.png", "prompt": "a"}
NEED = "image,prompt,edit_image,mask,clip,tags,seed,strength\n"
CASES = (
    # The file of the metadata
    Case("none", "", (), ("good.png: has no caption", "there is no metadata"), kind="none"),
    Case("a caption in another encoding", "", (), ("good.txt: is not UTF-8 text (byte 0xe9)", "save it as UTF-8"),
         {"good.txt": "caf\xe9".encode("latin-1")}, kind="none"),
    Case("two captions", "", (), ("good.png: has two captions, in good.txt and good.caption",),
         {"good.txt": b"a", "good.caption": b"b"}, kind="none"),
    Case("metadata in a folder below", "", (), ("files are not read, such as train/metadata.csv",),
         {"train": other_metadata}, kind="none"),
    Case("two", "image,prompt\ngood.png,a\n", (), ("metadata.csv and metadata.json",), {"metadata.json": "[]"}),
    Case("empty", "", (), ("is empty",)),
    Case("a header alone", "image,prompt\n", (), ("has no rows",)),
    Case("an empty list", "[]", (), ("has no rows",), kind="json"),
    Case("semicolons", "image;prompt\ngood.png;a\n", (), ("columns of metadata.csv: 'image;prompt'",)),
    Case("UTF-16", "image,prompt\ngood.png,a\n".encode("utf-16"), (), ("is not UTF-8 text", "save it as UTF-8")),
    Case("UTF-16 without a mark", "image,prompt\ngood.png,a\n".encode("utf-16-le"), (), ("contains a NUL character",)),
    Case("Latin-1", "image,prompt\ngood.png,a\ngood.png,caf\xe9\n".encode("latin-1"), ("3:prompt",), ("is not UTF-8",)),
    Case("a quote never closed", 'image,prompt\ngood.png,a\ngood.png,"b\n', ("3",), ("close the quotes",)),
    Case("text behind a quote", 'image,prompt\ngood.png,"a"b\n', ("2",), ("is not valid CSV",)),
    Case("one column twice", "image,image,prompt\na,b,c\n", (), ("the same name as an earlier one, 'image'",)),
    Case("a column without a name", "image,,prompt\na,b,c\n", (), ("column 2 has no name",)),
    Case("blanks around a name", "image, prompt\ngood.png,a\n", (), ("has spaces around its name, ' prompt'",)),
    Case("half of a pair in a name", '[{"\\ud800": "a"}]', (), ("column 1",), kind="json"),
    Case("no header", "good.png,a dog\ngood.png,b\n", (),
         ("there is no column 'image'", "columns of metadata.csv: 'good.png', 'a dog'")),
    Case("one object", '{"image": ["good.png"]}', (), ("is not a list of objects",), kind="json"),
    Case("broken json", '[{"image": "good.png"},]', (), ("is not valid JSON",), kind="json"),
    Case("jsonl called json", '{"prompt": "a"}\n{"prompt": "b"}\n', (), ("use .jsonl",), kind="json"),
    Case("json called jsonl", '[{"prompt": "a"}]', ("1",), ("a .json file contains a list",), kind="jsonl"),
    Case("nested json", "[" * 99_999, (), ("nested too deeply",), kind="json"),
    Case("a name misspelt", "imge,prompt\ngood.png,a\n", (), ("'image'", "--column image=NAME")),
    Case("no image", "prompt\na\n", (), ("column 'image'",)),
    Case("another ending", "image,prompt\n", (), ("must be a .csv",), kind="txt"),
    # Rows
    Case("ragged", "image,prompt\ngood.png\ngood.png,a\ngood.png,a,b\n", ("2", "4"), ("has 1 value,", "has 3 values")),
    Case("lines not json", '{"image": "good.png"}\n{"image":\nx\n', ("2", "3"), ("is not valid JSON",), kind="jsonl"),
    table("rows that are no objects", ("2", "3"), ("is not an object",), GOOD, ["good.png"], "good.png"),
    Case("a name twice in a row", '[{"prompt": "a", "prompt": "b"}]', ("1:prompt",), ("twice in the",), kind="json"),
    Case("rows and cells at once", "image,prompt\nnone.png,a\ngood.png\n", ("2:image", "3"), ("no such file",
         "1 value,")),
    # Cells
    table("objects in cells", ("1:prompt", "2:tags"), ("must be text",), {**GOOD, "prompt": {"a": 1}}, {**GOOD,
          "tags": [["a"]]}),
    Case("numbers that are none", '[{"image": "good.png", "prompt": NaN}]', ("1:prompt",),
         ("nan is not valid JSON",), kind="json"),
    Case("NUL in csv", "image,prompt\ngood.png,a\0b\n\0,a\n", ("2:prompt", "3:image"), ("contains a NUL character",)),
    table("NUL in json", ("2:prompt",), ("contains a NUL character",), GOOD, {**GOOD, "prompt": "\0"}),
    table("half of a pair", ("1:prompt", "2:tags"), ("half of a surrogate pair",), {**GOOD, "prompt": "\ud83d"},
          {**GOOD, "tags": ["\udc00"]}, kind="jsonl"),
    Case("an enormous cell", last("good.png," + "x" * (2**20 + 1), 4), ("4:prompt",), ("1,048,577 characters",)),
    table("an enormous cell in json", ("2:prompt",), ("1,048,577 characters",), GOOD, {**GOOD,
          "prompt": "x" * (2**20 + 1)}),
    Case("no integers", f"{NEED}good.png,a,,,,,1.0,\ngood.png,a,,,,,٣,\n", ("2:seed", "3:seed"),
         ("is not an integer",)),
    Case("no numbers", f"{NEED}good.png,a,,,,,,inf\ngood.png,a,,,,,,1_0\n", ("2:strength", "3:strength"),
         ("is not a finite number",)),
    table("a list where one is read", ("2:image",), ("is a list, but",), {**GOOD, "prompt": ["a", "b"]}, {**GOOD,
          "image": ["good.png"]}),
    Case("Python's lists", f"{NEED}good.png,a,['good.png'],,,,,\n", ("2:edit_image",), ('["a.png", "b.png"]',)),
    Case("lists with semicolons", f"{NEED}good.png,a,good.png;good.png,,,,,\n", ("2:edit_image",),
         ("no such file 'good.png;good.png'",)),
    table("a list with a blank", ("1:edit_image",), ("a blank file name",), {**GOOD, "edit_image": ["good.png",
          " "]}),
    Case("a list of numbers", f'{NEED}good.png,a,"[1, 2]",,,,,\n', ("2:edit_image",), ("an entry that is not text",)),
    Case("blank cells", "image,prompt\ngood.png,a\n,b\n ,c\n", ("3:image", "4:image"), ("is blank",)),
    # Files
    Case("missing files", last("none.png,c", 60), ("60:image",), ("no such file 'none.png'",)),
    Case("60 missing files", "image,prompt\n" + "none.png,a\n" * 60, tuple(f"{n}:image" for n in range(2, 52)),
         ("60 bad values", "and 10 more")),
    Case("a name with a slash behind", "image,prompt\ngood.png/,a\n", ("2:image",), ("no such file 'good.png/'",)),
    image_case("a folder", Path.mkdir, "is not a regular file"),
    image_case("a pipe", os.mkfifo, "is not a regular file"),
    image_case("a link to itself", lambda path: path.symlink_to(path), "no such file 'bad.png'"),
    image_case("a link that leads out", lambda path: path.symlink_to("/etc/hostname"),
            "points outside the dataset's folder"),
    Case("base64 in the place of a name", last("/9j/4AAQ" * 75_000 + ",c", 4), ("4:image",),
         ("is not a file name (600,000 characters)",)),
    Case("a name longer than any", last("x" * 256 + ".png,c", 4), ("4:image",), ("is not a file name (260 char",)),
    # Images
    image_case("text", "hello", "is not an image in a supported format"),
    image_case("nothing", b"", "is not an image in a supported format"),
    image_case("a program", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "is not an image in a supported format"),
    image_case("half a PNG", cut("PNG"), "'bad.png' cannot be read", at_once=False),
    image_case("half a JPEG", cut("JPEG"), "'bad.png' cannot be read", at_once=False),
    image_case("half a WebP", cut("WEBP", lossless=True), "'bad.png' cannot be read"),
    image_case("half a GIF", cut("GIF"), "'bad.png' cannot be read", at_once=False),
    image_case("half a TIFF", encoded("TIFF")[:-99], "bad.png' ", at_once=False),
    image_case("half a BMP", cut("BMP"), "'bad.png' cannot be read", at_once=False),
    image_case("half a PPM", cut("PPM"), "'bad.png' cannot be read", at_once=False),
    image_case("half an AVIF", cut("AVIF"), "bad.png' "),
    image_case("a thin one", encoded("PNG", Image.new("RGB", (64, 4))), "is too small for sides"),
    image_case("too many pixels", huge_png(), "has too many pixels"),
    image_case("another colour space", encoded("TIFF", Image.fromarray(NOISE).convert("LAB")),
            "colour mode LAB"),
    image_case("damage in the middle of a PNG", hurt(encoded("PNG")), "'bad.png' cannot be read", at_once=False,
            places=("3:image", "5:image")),
    image_case("floats beyond 1", encoded("TIFF", Image.fromarray(np.full((16, 16), 2, np.float32))),
            "float values outside 0",
            at_once=False),
    image_case("integers beyond 16 bits", encoded("TIFF", Image.fromarray(np.full((16, 16), 70_000, np.int32))),
            "grey values beyond 16 bits", at_once=False),
    # Videos
    video("half a video", part(film(), 0.5), "bad.mp4' "),
    video("a video that lost its frames", part(film(30, form="matroska"), 0.5), "truncated or damaged"),
    video("text as a video", "hello", "is not a video in a supported format"),
    video("sound", sound(), "has no video stream"),
    video("no bytes", b"", "is empty"),
    video("a play list", "#EXTM3U\n#EXTINF:1,\nhttp://a.example/x.ts\n", "is not a video in a supported"),
    video("an empty folder", frames(), "is a folder without frames", file="bad"),
    video("frames of two sizes", frames(32, 32, 48), "2.png is 32 x 48", file="bad"),
    video("a folder in a folder", frames(32, more=lambda path: (path / "deep").mkdir()), "is not a file", file="bad"),
    video("Matroska cut by a tenth", part(film(form="matroska"), 0.9), "seconds in its header",
          file="bad.mkv"),
    video("a small video", film(size=4), "is too small for sides that are multiples of 8"),
    # Masks of the loss
    mask_case("half a mask", cut("PNG"), "'bad.png' cannot be read", at_once=False),
    mask_case("a mask that is a video", film(), "is not an image in a supported format"),
    mask_case("a mask that is a folder", Path.mkdir, "is not a regular file"),
    mask_case("a mask of another shape", encoded("PNG", Image.new("L", (64, 32))),
              "'bad.png' is 32 x 64, and what it is of 64 x 64 (height x width); expected that size"),
    mask_case("a cut-out picture as a mask", encoded("PNG", Image.new("LA", (64, 64), (255, 0))),
              "'bad.png' has transparent parts", "save it without, or use --alpha_mask"),
    mask_case("a mask damaged in the middle", hurt(encoded("PNG")), "'bad.png' cannot be read", at_once=False),
    mask_case("a black mask", encoded("PNG", Image.new("L", (64, 64))),
              "'bad.png' masks out the whole image", "--unmasked_weight", at_once=False),
    mask_case("a black mask of another size", encoded("PNG", Image.new("L", (16, 16))), "nothing is left to train",
              at_once=False),
    Case("a mask that is not there", "image,prompt,shape\ngood.png,a,good.png\ngood.png,b,none.png\n", ("3:shape",),
         ("no such file 'none.png'",), flags=("--mask_column", "shape")),
    Case("an image and its mask", "image,prompt,shape\nno.png,a,none.png\n", ("2:image", "2:shape"), ("2 bad values",),
         flags=("--mask_column", "shape")),
    Case("a column of masks that is not there", "image,prompt,shape\ngood.png,a,good.png\n", (),
         ("--mask_column", "no column 'shapes'; did you mean 'shape'"), flags=("--mask_column", "shapes")),
    Case("no mask at all", "image,prompt,shape\ngood.png,a,\n", (), ("all values of column 'shape' are blank",),
         flags=("--mask_column", "shape")),
    Case("no alpha channel at all", "image,prompt\ngood.png,a\n", (), ("no image in column 'image' has an alpha",),
         flags=("--alpha_mask",)),
    Case("an alpha channel that leaves nothing", "image,prompt\ngood.png,a\nclear.png,b\n", ("3:image",),
         ("'clear.png' masks out the whole image",), {"clear.png": encoded("PNG", Image.new("RGBA", (64, 64)))},
         flags=("--alpha_mask",), at_once=False),
    masks_of_other("a mask of one of two datasets", "good.png,a,none.png\ngood.png,b,\n",
                   "data/more/metadata.csv: 1 bad value", "metadata.csv:2:outline: no such file 'none.png'"),
    masks_of_other("a black mask of one of two datasets", "good.png,a,good.png\ngood.png,b,black.png\n",
                   "'black.png' masks out the whole image", "--unmasked_weight", places=("3:outline",),
                   at_once=False),
    masks_of_other("no mask in one of two datasets", "good.png,a,\n",
                   "--dataset 1: --mask_column: has no effect: all values of column 'outline' are blank"),
    Case("a column of masks that one of two datasets lacks", "image,prompt,shape\ngood.png,a,good.png\n", (),
         ("--dataset 1: --mask_column: metadata.csv has no column 'outlines'; did you mean 'outline'",),
         {"more": masked_dataset("good.png,a,good.png\n")},
         flags=("--dataset", '{"dataset_base_path": "data/more", "mask_column": "outlines"}')),
    Case("a column of masks that no dataset has", "image,prompt,shape\ngood.png,a,good.png\n", (),
         ("--mask_column: no dataset has a column 'shapes'; did you mean 'shape'",
          "columns: image, prompt, shape, outline"),
         {"more": masked_dataset("good.png,a,good.png\n")},
         flags=("--mask_column", "shapes", "--dataset", '{"dataset_base_path": "data/more"}')),
    # Several datasets
    Case("a default caption of a table", "image,prompt\ngood.png,a\n", (),
         ("--dataset 1: --default_caption: has no effect: the dataset is no folder with captions",),
         {"more": masked_dataset("good.png,a,\n")},
         flags=("--dataset", '{"dataset_base_path": "data/more", "default_caption": "a"}')),
    Case("a column that another dataset lacks", "image,prompt\ngood.png,a\n", (),
         ("--dataset 1: --column: the dataset has no column 'text'",),
         {"more": masked_dataset("good.png,a,\n")},
         flags=("--dataset", '{"dataset_base_path": "data/more", "column": ["prompt=text"]}')),
    Case("no folder of another dataset", "image,prompt\ngood.png,a\n", (),
         ("--dataset 1: dataset_base_path: is required",),
         flags=("--dataset", '{"dataset_base_path": null}')),
    Case("an option of a dataset that is given twice", "image,prompt\ngood.png,a\n", (),
         ("--dataset 1: flip: is given twice, as True and False; give it once",),
         flags=("--dataset", '{"dataset_base_path": "data", "flip": true, "flip": false}')),
    # Sizes and columns asked for
    Case("a size off the multiples", "image,prompt\ngood.png,a\n", (), ("the nearest is 16",), flags=("--height", "20",
         "--width", "24")),
    Case("too small for a bucket", "image,prompt\ngood.png,a\n", ("2:image",),
         ("is too small for a bucket of --resolution 512", "--bucket_upscale"), flags=("--resolution", "512")),
    Case("no bucket at all", "image,prompt\ngood.png,a\n", (), ("64 has no bucket with sides of 128 to 128",),
         flags=("--resolution", "64", "--bucket_min_side", "128")),
    Case("another dataset that is damaged", "image,prompt\ngood.png,a\n", (),
         ("data/more/metadata.csv: 2 bad values", "metadata.csv:2:image: no such file 'none.png'",
          "metadata.csv:4:image"),
         {"more": other_dataset}, flags=("--dataset", '{"dataset_base_path": "data/more"}')),
    Case("another dataset that is nothing", "image,prompt\ngood.png,a\n", (), ("no images or videos",),
         {"more": Path.mkdir}, flags=("--dataset", '{"dataset_base_path": "data/more"}')),
    Case("numbers of frames off the multiples", "image,prompt,clip\ngood.png,a,good.mp4\n", (),
         ("--num_frames: 6 is not 4n+1; the nearest is 5",), flags=("--num_frames", "5,6,11")),
    Case("a column that is not there", "image,prompt\ngood.png,a\n", (),
         ("no input loads a file from column 'imag'; did you mean 'image'",),
         flags=("--data_file_keys", "imag")),
    Case("an input that is not there", "image,prompt\ngood.png,a\n", (),
         ("no column of metadata.csv gives input 'mask'",),
         flags=("--extra_inputs", "mask")),
    Case("a root that is not there", "image,prompt\ngood.png,a\n", (), ("none is not a folder",),
         flags=("--dataset_root", "none")),
)  # fmt: skip


@pytest.fixture(scope="module")
def broad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the family of these tests."""
    site = tmp_path_factory.mktemp("site")
    broad_family.install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


def write(folder: Path, case: Case) -> None:
    """Write a case's dataset, with good files beside it."""
    folder.mkdir()
    (folder / "good.png").write_bytes(encoded("PNG"))
    (folder / "good.mp4").write_bytes(film())
    files = dict(case.files)
    if case.kind != "none":
        files[f"metadata.{case.kind}"] = case.metadata
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif isinstance(content, str):
            (folder / name).write_text(content)
        elif callable(content):
            content(folder / name)


def digests(folder: Path) -> dict[str, str]:
    """Each of the user's files: its place -> a digest of its bytes, or its kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = str(path.lstat().st_mode)
        if path.is_file() and not path.is_symlink():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.mark.usefixtures("broad")
@pytest.mark.parametrize(
    "case", CASES, ids=[case.name.replace(" ", "-") for case in CASES]
)
def test_a_bad_dataset_is_named_and_left_as_it_was(
    case: Case,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    write(data, case)
    before = digests(data)
    words = ["--model", "broad", "--toy", "--num_frames", "5"]
    words += ["--dataset_base_path", "data", "--output_path", "out"]
    if case.kind == "txt":
        words += ["--dataset_metadata_path", "data/metadata.txt"]
    assert main([*words, *case.flags]) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert digests(data) == before
    warned, error = "dstrain: warning: ", "dstrain: error: "
    lines = [line for line in said.splitlines() if not line.startswith(warned)]
    if case.at_once:
        assert lines[0].startswith(error)
    else:
        lines = lines[[line.startswith(error) for line in lines].index(True) :]
    for words in case.words:
        assert words in "\n".join(lines)
    wanted = [f"metadata.{case.kind}:{place}" for place in case.places]
    if not case.at_once:
        assert any(lines[0].startswith(f"{error}{place}: ") for place in wanted)
    elif case.places and lines[0].startswith("dstrain: error: data/metadata"):
        place = re.match(r"dstrain: error: data/(\S+?): ", lines[0])
        listed = [
            found[1]
            for line in lines[1:]
            if (found := re.match(r"  (metadata\.\w+:\d+(?::\w+)?): ", line))
        ]
        assert wanted in (listed, [place and place[1]])
    else:
        assert not case.places


def test_there_are_sixty_kinds_of_bad_data_at_least() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
