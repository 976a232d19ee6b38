"""Aspect buckets: an image is loaded at the size that cuts off the least, in few sizes,
of at most the area that is asked for.
"""

import itertools
import random

import pytest
from dstrain import UsageError
from dstrain.data import Buckets
from dstrain.data.variants.buckets import TooSmall, cropped_share


@pytest.mark.parametrize(
    ("side", "multiple", "step"),
    [(1024, 16, 64), (512, 16, 32), (64, 16, 16), (48, 8, 8)],
)
def test_the_step_is_a_sixteenth_of_the_side_and_fits_the_model(
    side: int, multiple: int, step: int
) -> None:
    assert Buckets(side).step_for(multiple) == step


def test_a_given_step_is_brought_to_the_models_multiples() -> None:
    assert Buckets(1024, step=40).step_for(16) == 80


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


def test_the_bucket_is_the_one_that_cuts_off_the_least() -> None:
    buckets = Buckets(1024)
    draw = random.Random(0)
    for _ in range(500):
        size = (draw.randint(1500, 6000), draw.randint(1500, 6000))
        best = min(cropped_share(size, bucket) for bucket in buckets.sizes(16))
        found = buckets.fit(size, 16)
        assert cropped_share(size, found) == best
        assert found in buckets.sizes(16)


@pytest.mark.parametrize(
    "size", [(1500, 1000), (1000, 1500), (4000, 700), (1024, 1024)]
)
def test_nothing_is_scaled_up(size: tuple[int, int]) -> None:
    height, width = Buckets(1024).fit(size, 16)
    assert max(height / size[0], width / size[1]) <= 1


def test_a_small_image_keeps_its_size_cut_to_steps() -> None:
    assert Buckets(1024).fit((700, 900), 16) == (640, 896)
    assert Buckets(1024, step=16).fit((700, 900), 16) == (688, 896)


def test_a_small_image_is_scaled_up_if_asked() -> None:
    assert Buckets(1024, upscale=True).fit((70, 90), 16) in Buckets(1024).sizes(16)
    assert Buckets(64, upscale=True).fit((10, 10), 16) == (64, 64)


def test_an_image_below_the_least_side_is_refused_with_what_helps() -> None:
    with pytest.raises(TooSmall, match=r"300 x 900 .* 512.*--bucket_upscale") as error:
        Buckets(1024).fit((300, 900), 16)
    assert "--bucket_min_side" in str(error.value)
    assert Buckets(1024, least=256).fit((300, 900), 16) == (256, 896)


def test_limits_without_a_bucket_are_refused() -> None:
    with pytest.raises(UsageError, match="8 is too small: at least 16 is needed"):
        Buckets(8).sizes(16)
    with pytest.raises(UsageError, match=r"--resolution: 1024 has no bucket"):
        Buckets(1024, least=1536).sizes(16)
    with pytest.raises(UsageError, match=r"--bucket_max_side"):
        Buckets(64, step=48, greatest=40, least=60).sizes(16)


def test_the_share_that_is_cropped_is_that_of_the_area() -> None:
    assert cropped_share((100, 200), (100, 100)) == 0.5
    assert cropped_share((200, 100), (64, 64)) == 0.5
    assert cropped_share((100, 200), (50, 100)) == 0
    for size, loaded in itertools.permutations([(3, 4), (9, 16), (21, 9)], 2):
        assert 0 < cropped_share(size, loaded) < 1
