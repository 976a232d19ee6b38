"""A FLUX.2 of toy sizes with random weights, in the published layout.

Text encoders have four layers and dropout, so that one left in training mode is noticed,
and initial ranges that make prompts differ clearly. The tokenizer knows printable ASCII,
a token for each character, and fills in chat templates as the published ones do.
"""

import json

from dstrain.plugin import toy_writer

from dstrain_flux2.components import COMPONENTS, CONFIGS

write = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))
