"""Flips and crops of the images of a row, of which each draw takes one."""

from dataclasses import dataclass
from typing import NamedTuple

CENTRE = 0.5


class View(NamedTuple):
    """How an image is seen that is scaled to cover a size."""

    flip: bool = False
    """Whether it is mirrored left to right."""
    crop: float = CENTRE
    """Where it is cropped: 0 at the left or the top of what is cut off, 1 at its right or
    bottom.
    """


PLAIN = View()
WeightedView = tuple[int, View]
"""A view and how probable it is, in proportion to the others of its row."""


@dataclass(frozen=True)
class AugmentationOptions:
    """What is made of the images and videos of a row, of all of them alike."""

    flip: bool = False
    crops: int = 1
    """Places at which images are cropped, evenly spaced."""

    def views(self, is_cropped: bool) -> list[WeightedView]:
        """Return the views of a row, the plain one first.

        Args:
            is_cropped: Whether anything of its images is cut off: else all crops are
                the same, and there is one.
        """
        places = [(number + 0.5) / self.crops for number in range(self.crops)]
        places.sort(key=lambda place: abs(place - CENTRE))
        if not is_cropped:
            places = [CENTRE]
        flips = (False, True) if self.flip else (False,)
        views = [(1, View(flip, place)) for flip in flips for place in places]
        # Validation takes the first: the centre, which an even number of crops has not.
        return views if places[0] == CENTRE else [(0, PLAIN), *views]


NO_AUGMENTATION = AugmentationOptions()
