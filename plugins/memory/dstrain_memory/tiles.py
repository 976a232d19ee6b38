"""Say how a VAE computes a large image: in tiles that overlap, as diffusers does it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Tiles:
    """How one VAE computes; a side of 0 is one that is not cut into tiles."""

    height: int = 0
    """Sides of a tile in pixels."""
    width: int = 0
    stride_height: int = 0
    """Pixels from the beginning of one tile to that of the next."""
    stride_width: int = 0
    framewise: bool = False
    """Whether a video is computed in groups of frames."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return what its results depend on, as JSON data."""
        return asdict(self)

    def apply(self, vae: Any) -> None:
        """Let a VAE of diffusers compute so from now on."""
        if self.height and hasattr(vae, "tile_sample_min_height"):
            vae.enable_tiling(
                tile_sample_min_height=self.height,
                tile_sample_min_width=self.width,
                tile_sample_stride_height=self.stride_height,
                tile_sample_stride_width=self.stride_width,
            )
        elif self.height:
            vae.enable_tiling()
            factor = vae.tile_sample_min_size // vae.tile_latent_min_size
            vae.tile_sample_min_size = self.height
            vae.tile_latent_min_size = self.height // factor
            # A fraction: the VAE rounds products of it down, and those of a float may
            # be just below.
            overlap = self.height - self.stride_height
            vae.tile_overlap_factor = Fraction(overlap, self.height)
        for direction in ("encoding", "decoding") if self.framewise else ():
            if hasattr(vae, f"use_framewise_{direction}"):
                setattr(vae, f"use_framewise_{direction}", True)
