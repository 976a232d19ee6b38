"""Equal content has equal digests, wherever it is, and only equal content."""

from pathlib import Path

from dstrain.storage import Digests, hash_json

NO_MEMORY = Path("absent")


def test_hashes_depend_on_kind_and_content_but_not_on_the_order_of_names() -> None:
    assert hash_json("a", {"x": 1, "y": 2}) == hash_json("a", {"y": 2, "x": 1})
    # Names that are not UTF-8 have hashes of their own.
    names = [name.decode(errors="surrogateescape") for name in (b"\xff", b"\xfe")]
    others = [("b", [1]), *(("a", one) for one in ([1], ["1"], [[1]], *names))]
    assert len({hash_json(kind, content) for kind, content in others}) == 6


def test_a_component_is_its_bytes_a_folder_its_files(tmp_path: Path) -> None:
    files = {"a/x": "1", "a/sub/y": "2", "b/x": "1", "b/sub/y": "2", "c/y": "1"}
    for name, content in (files | {"c/sub/x": "2"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    def digest(*names: str) -> str:
        return Digests(NO_MEMORY).of_all([tmp_path / name for name in names])

    assert digest("a") == digest("b") != digest("c")
    assert digest("a/x") == digest("b/x") != digest("a/sub/y")
    # The name of a file itself does not count.
    assert digest("a/x", "a/sub/y") == digest("b/sub/y", "c/y")
    (tmp_path / "a/.cache").mkdir()
    (tmp_path / "a/.cache/state").touch()
    assert digest("a") == digest("b")
    (tmp_path / "a/sub/y").write_text("3")
    assert digest("a") != digest("b")
