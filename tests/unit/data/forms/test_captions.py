"""The caption in a file is all of its text, and what is none is said."""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data.forms import read_caption
from dstrain.data.forms.captions import as_caption


@pytest.mark.parametrize(
    ("name", "content", "caption"),
    [
        ("a.txt", b"a dog\n", "a dog"),
        ("a.txt", b"\xef\xbb\xbfa dog\r\nin a boat\r\n", "a dog\nin a boat"),
        ("a.caption", "ünï 猫".encode(), "ünï 猫"),
        ("a.txt", b" \n", ""),
        ("a.json", b'{"caption": "a", "prompt": "a "}', "a"),
        ("a.json", b'{"text": " c ", "size": [1, 2]}', "c"),
        ("a.json", b'{"size": 3}', ""),
        ("a.json", b"[1]", ""),
        ("a.json", b"", ""),
    ],
)
def test_the_caption_is_the_text(
    tmp_path: Path, name: str, content: bytes, caption: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_caption(tmp_path / name) == caption


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "caf\xe9".encode("latin-1"), r"not UTF-8 text \(byte 4 is 0xe9\)"),
        ("a.txt", b"\xef\xbb\xbf\xff", r"byte 4 is 0xff"),
        ("a.txt", "a dog".encode("utf-16"), r"not UTF-8 text \(byte 1 is 0xff\)"),
        ("a.txt", b"a\0b", "NUL"),
        ("a.json", b"{", "is not valid JSON"),
        ("a.json", b'{"caption": 3}', "has a caption that is not text"),
    ],
)
def test_what_is_no_text_is_said(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_caption(tmp_path / name)


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (2**22 + 1))
    with pytest.raises(UsageError, match="has more than"):
        read_caption(path)
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(ValueError, match="characters"):
        read_caption(path)


def test_lines_stay() -> None:
    assert as_caption("\n a\r\nb\n\n") == "a\nb"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"caption": "a", "caption": "b"}', "has caption twice"),
        ('{"caption": "a", "text": "b"}', "different texts in caption and text"),
        ('{"caption":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ],
)
def test_json_whose_caption_is_not_one_text_is_refused(
    tmp_path: Path, content: str, what: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=what):
        read_caption(tmp_path / "a.json")
