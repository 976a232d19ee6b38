"""Views of a row's images: the plain one first, each once."""

from dstrain.data.variants.views import PLAIN, AugmentationOptions, View


def test_without_options_there_is_the_plain_view() -> None:
    assert AugmentationOptions().views(is_cropped=True) == [PLAIN]


def test_crops_lie_evenly_and_the_first_is_nearest_to_the_centre() -> None:
    places = [view.crop for view in AugmentationOptions(crops=4).views(True)]
    assert sorted(places) == [0.125, 0.375, 0.625, 0.875]
    assert places[0] in (0.375, 0.625)
    assert AugmentationOptions(crops=3).views(True)[0] == PLAIN


def test_an_image_that_is_not_cropped_has_one_crop() -> None:
    assert AugmentationOptions(crops=4).views(is_cropped=False) == [PLAIN]


def test_each_crop_is_seen_both_ways() -> None:
    found = AugmentationOptions(flip=True, crops=2).views(True)
    assert set(found) == {
        View(flip, crop) for flip in (False, True) for crop in (0.25, 0.75)
    }
    assert not found[0].flip
