"""Write a tiny model with random weights in the layout of the published model."""

from dstrain.plugin import toy_writer

from .components import COMPONENTS

write = toy_writer(
    COMPONENTS,
    networks={
        "dit": {"channels": 4, "width": 16, "depth": 2, "text_width": 16},
        # Dropout, so that an encoder left in training mode is noticed.
        "text_encoder": {"width": 16, "dropout": 0.1},
        "vae": {"channels": 4, "side": 8},
    },
)
