"""An SDXL of toy sizes with random weights, in the published layout."""

import json

from dstrain.plugin import toy_writer

from dstrain_sdxl.components import COMPONENTS, CONFIGS

write = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))
