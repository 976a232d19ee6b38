"""Views of a row's images: the plain one first, each once."""

from dstrain.data import AugmentationOptions

PLAIN = (False, 0.5)
"""Whether it is mirrored, and where it is cropped: about the centre."""


def test_without_options_there_is_the_plain_view() -> None:
    assert AugmentationOptions().views(is_cropped=True) == [(1, PLAIN)]
    # One that is not cropped has one crop.
    assert AugmentationOptions(crops=4).views(is_cropped=False) == [(1, PLAIN)]


def test_crops_lie_evenly_and_the_first_is_the_centre() -> None:
    views = AugmentationOptions(crops=4).views(True)
    drawn = [view.crop for weight, view in views if weight]
    assert sorted(drawn) == [0.125, 0.375, 0.625, 0.875]
    # That of an even number is never drawn.
    assert views[0] == (0, PLAIN)
    assert AugmentationOptions(crops=3).views(True)[0] == (1, PLAIN)


def test_each_crop_is_seen_both_ways() -> None:
    (first, *drawn) = AugmentationOptions(flip=True, crops=2).views(True)
    assert first == (0, PLAIN)
    both = {(1, (flip, crop)) for flip in (False, True) for crop in (0.25, 0.75)}
    assert set(drawn) == both
