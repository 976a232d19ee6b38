"""The demo's images and its judge: scikit-learn's handwritten digits as a dataset,
and a classifier that reads them.

The commands:
    python demo/digits.py data FOLDER                  the digits in black ink on white paper, with captions
    python demo/digits.py look FOLDER                  a few hundred of them in the new look
    python demo/digits.py judge GRID.png FOLDER ...    read the images 7-00.png, 7-01.png, ... of each folder
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

SIZE = 64
"""Height and width of every picture, in pixels."""
TRAIN = 1500
"""Digits to train on; the other 297, by writers who are not among these, are held out
to test the judge.
"""
LOOK_IMAGES = 300
GAP = 4
"""Pixels between the images of a grid."""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Style(NamedTuple):
    """Colours of a picture, as red, green and blue in 0..255, and what a caption says
    about them.
    """

    ink: tuple[int, int, int]
    paper: tuple[int, int, int]
    words: str


PLAIN = Style(ink=(0, 0, 0), paper=(255, 255, 255), words="")
LOOK = Style(ink=(150, 15, 25), paper=(250, 220, 90), words=", red ink on yellow paper")


def caption(digit: int, style: Style = PLAIN) -> str:
    """Say what an image of `digit` in `style` shows."""
    return f"a picture of the number {NAMES[digit]}{style.words}"


def strokes() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Give all 1,797 digits enlarged, (1797, 64, 64) with 0 for paper and 1 for ink,
    and what they are, (1797,).
    """
    digits = load_digits()
    small = [
        Image.fromarray((image / 16).astype(np.float32)) for image in digits.images
    ]
    large = [
        np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC))
        for image in small
    ]
    return np.stack(large).clip(0, 1), digits.target


def paint(stroke: NDArray[np.float32], style: Style = PLAIN) -> Image.Image:
    """Paint one digit, (64, 64) in 0..1, in the colours of `style`."""
    ink, paper = np.array(style.ink), np.array(style.paper)
    return Image.fromarray(
        (paper + stroke[..., None] * (ink - paper)).round().astype(np.uint8)
    )


def write(folder: Path, style: Style = PLAIN, count: int = TRAIN) -> None:
    """Write the first `count` digits as a dataset: images, and metadata.csv with the
    columns image and prompt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("image", "prompt"))
        for index, (stroke, digit) in enumerate(
            zip(*(part[:count] for part in strokes()), strict=True)
        ):
            name = f"{index:04}.png"
            paint(stroke, style).save(folder / name)
            rows.writerow((name, caption(digit, style)))


def restyle(folder: Path) -> None:
    """Write a few hundred digits in the new look, as a dataset."""
    write(folder, LOOK, LOOK_IMAGES)


def features(image: Image.Image) -> NDArray[np.float32]:
    """Give the 64 numbers that the judge reads: means of 8x8 parts, 0 for paper and 1
    for the strongest ink.

    Colours do not matter. The paper is the grey of the left and right edges; ink may be
    darker or lighter than it.
    """
    grey = np.asarray(
        image.convert("L").resize((8, 8), Image.Resampling.BOX), dtype=np.float32
    )
    ink = grey - np.median(grey[:, [0, -1]])
    ink = (ink * np.sign(ink.sum())).clip(min=0)
    strongest = max(float(ink.max()), 1.0)
    return np.asarray(ink / strongest, dtype=np.float32).ravel()


def in_look(image: Image.Image, style: Style) -> bool:
    """Tell whether the paper, the median of the left and right edges, is within 40 of
    255 of the paper of `style`.
    """
    edges = np.asarray(image.convert("RGB"))[:, [0, 1, -2, -1]].reshape(-1, 3)
    return bool((abs(np.median(edges, axis=0) - style.paper) < 40).all())


class Judge:
    """A support vector classifier trained on real digits in black ink, which reads
    images in any two colours.
    """

    def __init__(self) -> None:
        images, self.digits = strokes()
        self.images = [paint(image) for image in images]
        self.classifier = SVC(gamma=0.2).fit(
            [features(p) for p in self.images[:TRAIN]], self.digits[:TRAIN]
        )

    def read(self, images: Sequence[Image.Image]) -> NDArray[np.int64]:
        """Say which digit each image shows."""
        read: NDArray[np.int64] = self.classifier.predict(
            [features(image) for image in images]
        )
        return read

    def accuracy(
        self, images: Sequence[Image.Image], digits: Sequence[int] | NDArray[np.int64]
    ) -> float:
        """Give the share of images, 0..1, that are read as the digits they should
        show.
        """
        return float((self.read(images) == np.asarray(digits)).mean())

    def accuracy_on_real(self) -> float:
        """Give the share of the held-out real digits that are read as what they are."""
        return self.accuracy(self.images[TRAIN:], self.digits[TRAIN:])


def write_grid(
    path: Path, images: Sequence[Image.Image], digits: Sequence[int]
) -> None:
    """Write all images as one, a row for each digit 0..9, in the order given."""
    rows = [
        [p for p, digit in zip(images, digits, strict=True) if digit == row]
        for row in range(10)
    ]
    cell = SIZE + GAP
    grid = Image.new("RGB", (max(map(len, rows)) * cell + GAP, 10 * cell + GAP), "grey")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            grid.paste(image, (x * cell + GAP, y * cell + GAP))
    grid.save(path)


@click.group()
def main() -> None:
    """Write the demo's datasets, and judge its images."""


@main.command("data")
@click.argument("folder", type=click.Path(path_type=Path))
def data_command(folder: Path) -> None:
    """Write the digits in black ink on white paper to FOLDER."""
    write(folder)


@main.command("look")
@click.argument("folder", type=click.Path(path_type=Path))
def look_command(folder: Path) -> None:
    """Write a few hundred digits in the new look to FOLDER."""
    restyle(folder)


@main.command("judge")
@click.argument("grid", type=click.Path(path_type=Path))
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@click.option(
    "--least",
    default=0.0,
    help="Fail if a smaller share of the first folder shows the digit asked for.",
)
def judge_command(grid: Path, folders: tuple[Path, ...], least: float) -> None:
    """Read the images of each of FOLDERS, whose names begin with their digit, and
    write them all to GRID.
    """
    judge = Judge()
    shares: list[float] = []
    all_images: list[Image.Image] = []
    all_digits: list[int] = []
    for folder in folders:
        paths = sorted(folder.glob("[0-9]-*.png"))
        if not paths:
            raise click.UsageError(f"{folder}: no images named like 7-00.png")
        images, digits = (
            [Image.open(path).convert("RGB") for path in paths],
            [int(path.name[0]) for path in paths],
        )
        share = np.mean([in_look(image, LOOK) for image in images])
        right = judge.accuracy(images, digits)
        shares.append(right)
        click.echo(
            f"{folder}: {right:.2f} of {len(paths)} images show the digit asked for"
        )
        click.echo(f"{folder}: {share:.2f} of them are on yellow paper")
        all_images += images
        all_digits += digits
    click.echo(
        f"real digits, held out: {judge.accuracy_on_real():.2f} are read as what they are"
    )
    write_grid(grid, all_images, all_digits)
    if shares[0] < least:
        raise click.ClickException(f"{shares[0]:.2f} is below {least}")


if __name__ == "__main__":
    main()
