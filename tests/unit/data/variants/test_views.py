"""Views of a row's images: the plain one first, each once."""

from dstrain.data import AugmentationOptions
from dstrain.data.variants.views import PLAIN, View


def test_without_options_there_is_the_plain_view() -> None:
    assert AugmentationOptions().views(is_cropped=True) == [(1, PLAIN)]


def test_crops_lie_evenly_and_the_first_is_the_centre() -> None:
    views = AugmentationOptions(crops=4).views(True)
    drawn = [view.crop for weight, view in views if weight]
    assert sorted(drawn) == [0.125, 0.375, 0.625, 0.875]
    assert AugmentationOptions(crops=3).views(True)[0] == (1, PLAIN)


def test_the_centre_of_an_even_number_of_crops_is_never_drawn() -> None:
    views = AugmentationOptions(crops=2, flip=True).views(True)
    assert views[0] == (0, PLAIN)
    assert all(weight == 1 for weight, _ in views[1:])


def test_an_image_that_is_not_cropped_has_one_crop() -> None:
    assert AugmentationOptions(crops=4).views(is_cropped=False) == [(1, PLAIN)]


def test_each_crop_is_seen_both_ways() -> None:
    found = AugmentationOptions(flip=True, crops=2).views(True)
    assert {view for weight, view in found if weight} == {
        View(flip, crop) for flip in (False, True) for crop in (0.25, 0.75)
    }
    assert not found[0][1].flip
