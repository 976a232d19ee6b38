"""A form of datasets: a zip of pictures, each with a text of the same name beside it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from dstrain.plugin import Content, Form, FormRow, Given, Source, TrainConfig, hookimpl

api = 2


class Zip(Form):
    """Zips of PNG files."""

    name = "zip"
    reads = (".zip",)

    def find(self, given: Given) -> Source | None:
        path = given.path
        is_one = path.suffix == ".zip" and path.is_file()
        return Source(self.name, path, path.parent, (path,)) if is_one else None

    def columns(self, file: Path) -> Mapping[str, bool]:
        return {"image": True, "prompt": False}

    def rows(self, file: Path, columns: Mapping[str, bool]) -> Iterator[FormRow]:
        with ZipFile(file) as archive:
            names = set(archive.namelist())
            for name in sorted(one for one in names if one.endswith(".png")):
                text = str(PurePosixPath(name).with_suffix(".txt"))
                prompt = archive.read(text).decode() if text in names else ""
                content = Content(partial(pieces, archive, name), name)
                yield {"image": content, "prompt": prompt}


def pieces(archive: ZipFile, name: str) -> list[bytes]:
    return [archive.read(name)]


@hookimpl
def dstrain_forms(options: TrainConfig) -> Sequence[Form]:
    return [Zip()]
