"""Aspect buckets: an image is loaded at the size that cuts off the least, in few sizes."""

import random
from pathlib import Path

import pytest
from dstrain.data import Resolution
from dstrain.data.buckets import Buckets
from dstrain.plugin import Column
from PIL import Image

from tests.support.datasets import bad_cells, open_rows


@pytest.mark.parametrize(
    ("buckets", "multiple", "step"),
    [
        *((Buckets(1024), 16, 64), (Buckets(512), 16, 32)),
        *((Buckets(64), 16, 16), (Buckets(48), 8, 8)),
        # A given one is brought to the model's multiples.
        (Buckets(1024, step=40), 16, 80),
    ],
)
def test_the_step_is_a_sixteenth_of_the_side_and_fits_the_model(
    buckets: Buckets, multiple: int, step: int
) -> None:
    assert buckets.step_for(multiple) == step


@pytest.mark.parametrize("side", [64, 512, 768, 1024])
def test_buckets_are_within_the_area_and_their_limits(side: int) -> None:
    buckets = Buckets(side)
    step = buckets.step_for(16)
    sizes = buckets.sizes(16)
    assert (side, side) in sizes
    assert {(width, height) for height, width in sizes} == set(sizes)
    for height, width in sizes:
        assert height * width <= side * side
        assert side // 2 <= height <= 2 * side
        assert height % step == width % step == 0
        # No bucket could grow in either direction alone without leaving the area.
        assert (height + step) * (width + step) > side * side


def cropped(size: tuple[int, int], loaded: tuple[int, int]) -> float:
    """The share that is cut off an image that is scaled to cover another size."""
    height, width = size
    scale = max(loaded[0] / height, loaded[1] / width)
    return 1 - loaded[0] * loaded[1] / (height * width * scale**2)


def test_the_bucket_is_the_one_that_cuts_off_the_least() -> None:
    buckets = Buckets(1024)
    draw = random.Random(0)
    for _ in range(500):
        size = (draw.randint(1500, 6000), draw.randint(1500, 6000))
        best = min(cropped(size, bucket) for bucket in buckets.sizes(16))
        found = buckets.fit(size, 16)
        assert cropped(size, found) == pytest.approx(best)
        assert found in buckets.sizes(16)
    # Nothing is scaled up.
    for size in ((1500, 1000), (1000, 1500), (4000, 700), (1024, 1024)):
        height, width = buckets.fit(size, 16)
        assert max(height / size[0], width / size[1]) <= 1


def test_a_small_image_keeps_its_size_cut_to_steps_or_is_scaled_up_if_asked() -> None:
    assert Buckets(1024).fit((700, 900), 16) == (640, 896)
    assert Buckets(1024, step=16).fit((700, 900), 16) == (688, 896)
    assert Buckets(1024, upscale=True).fit((70, 90), 16) in Buckets(1024).sizes(16)
    assert Buckets(64, upscale=True).fit((10, 10), 16) == (64, 64)


def test_an_image_below_the_least_side_is_refused_with_what_helps() -> None:
    with pytest.raises(
        ValueError, match=r"300 x 900 .* 512.*--bucket_upscale"
    ) as error:
        Buckets(1024).fit((300, 900), 16)
    assert "--bucket_min_side" in str(error.value)
    assert Buckets(1024, least=256).fit((300, 900), 16) == (256, 896)


def test_a_small_image_needs_a_size_of_one_resolution(tmp_path: Path) -> None:
    for name, size in {"small": (40, 60), "wide": (256, 128)}.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    image = {name: Column(name, "image", multiple=16) for name in ("image", "other")}
    rows = [{"image": "small.png"}, {"image": "wide.png"}]
    large, small = (Resolution(None, None, 1, Buckets(side)) for side in (128, 64))
    found = bad_cells(tmp_path, rows, image, resolution=large)
    assert list(found) == ["metadata.json:1:image"]
    both = {"resolution": large, "further_resolutions": (small,)}
    bad = [{"image": "small.png", "other": "none.png"}]
    assert list(bad_cells(tmp_path, bad, image, **both)) == ["metadata.json:1:other"]
    data = open_rows(tmp_path, rows, image, **both)
    assert data.sample_ids.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert len(data.cropped) == 3
    assert data.cropped[0] == pytest.approx(cropped((60, 40), (48, 32)))
