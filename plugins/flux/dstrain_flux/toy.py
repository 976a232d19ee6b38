"""A FLUX of toy sizes with random weights, in the published layout.

Encoders have dropout, so that one left in training mode is noticed, and initial ranges
that make prompts differ clearly. CLIP's tokenizer knows every byte, alone and at a
word's end; T5's knows printable ASCII, as most other characters are unknown to T5.
"""

import json

from dstrain.plugin import toy_writer

from dstrain_flux.components import COMPONENTS, CONFIGS

write = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))
