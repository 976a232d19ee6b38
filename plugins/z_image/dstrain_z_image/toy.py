"""A Z-Image of toy sizes with random weights, in the published layout.

The text encoder has dropout, so that one left in training mode is noticed, and an
initial range that makes prompts differ clearly. The tokenizer knows every byte.
"""

import json

from dstrain.plugin import toy_writer

from dstrain_z_image.components import COMPONENTS, CONFIGS

write = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))
