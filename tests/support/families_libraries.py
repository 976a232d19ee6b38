"""Import what every family's tests import, once for all children of a server."""

import diffusers
import peft  # noqa: F401  # importing it is all
import transformers

for name in ("FluxPipeline", "QwenImageEditPlusPipeline", "WanImageToVideoPipeline"):
    getattr(diffusers, name)
for name in ("CLIPTextModel", "Qwen2_5_VLModel", "UMT5EncoderModel"):
    getattr(transformers, name)
