"""The tensor functions of a family's interface are those of core."""

from dstrain.data import convert, cover, white_pixels
from dstrain.graph import long_prompts
from dstrain.models import functional as models
from dstrain.models.execution import around_blocks
from dstrain.plugin import functional
from PIL import Image


def test_each_public_function_is_the_one_of_core() -> None:
    images = {
        "convert_image": convert,
        "cover_image": cover,
        "white_pixels": white_pixels,
    }
    for name in functional.__all__:
        places = (models, long_prompts, around_blocks)
        found = [vars(place)[name] for place in places if name in vars(place)]
        expected = found[0] if found else images[name]
        assert getattr(functional, name) is expected


def test_images_become_tensors_and_images_again() -> None:
    image = Image.new("RGB", (4, 2), (255, 0, 51))
    tensor = functional.images_to_tensor([image])
    assert tensor.shape == (1, 3, 2, 4)
    assert functional.tensor_to_image(tensor).tobytes() == image.tobytes()
