"""An SDXL of toy sizes with random weights, in the published layout.

Encoders have dropout, so that one left in training mode is noticed, and initial ranges
that make prompts differ clearly. The tokenizers know every byte, alone and at a word's
end.
"""

import json

from dstrain.plugin import toy_writer

from dstrain_sdxl.components import COMPONENTS, CONFIGS

write = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))
