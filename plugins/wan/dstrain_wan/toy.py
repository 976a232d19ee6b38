"""Wan of toy sizes with random weights, in the published layout.

Text encoders have dropout, so that one left in training mode is noticed.
"""

import json

from dstrain.plugin import toy_writer

from dstrain_wan.components import COMPONENTS, CONFIGS

write = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))
