"""Resolve what a run asks of its VAEs: sides of tiles that each of them can take."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.config.options import ModelChoice
from dstrain.console import get_logger
from dstrain.errors import UsageError
from dstrain.graph import PipelineSpec
from dstrain.models import Config, Found, components_of, empty_component
from dstrain.models.components import Component
from dstrain.models.execution import Tiles
from dstrain.registry import ModelFamily

logger = get_logger(__name__)
FRAMEWISE = "--framewise_decoding"


@dataclass(frozen=True)
class Tiling:
    """What a run asks of its VAEs; None leaves a value to the VAE."""

    tiled: bool = False
    size: int | None = None
    """Side of a tile in pixels."""
    stride: int | None = None
    """Pixels from one tile to the next."""
    framewise: bool = False

    @classmethod
    def of(cls, config: ModelChoice) -> "Tiling":
        """Return what a configuration asks for."""
        return cls(
            config.tiled,
            config.tile_size,
            config.tile_stride,
            config.framewise_decoding,
        )

    def __bool__(self) -> bool:
        return self.tiled or self.framewise


def check_tiling(tiling: Tiling, family: ModelFamily, spec: PipelineSpec) -> None:
    """Raise UsageError where tiles are asked for and no component of a variant can
    compute in tiles; log what is asked for and done in any case.
    """
    if not tiling:
        return
    vaes = _vaes(family, spec)
    if not vaes:
        flag = "--tiled" if tiling.tiled else FRAMEWISE
        raise UsageError(flag, f"has no effect: {spec.where} has no VAE with tiling")
    if tiling.framewise and any(_is_framewise(_network_class(one)) for one in vaes):
        logger.info(f"{FRAMEWISE}: the VAE of {spec.where} does so in any case")


def can_tile(family: ModelFamily, spec: PipelineSpec) -> bool:
    """Return whether a component of a variant can compute in tiles."""
    return bool(_vaes(family, spec))


def _vaes(family: ModelFamily, spec: PipelineSpec) -> list[Component]:
    known = components_of(family)
    return [known[one] for one in spec.components if _takes_tiles(known[one])]


def with_tiles(found: Found, family: ModelFamily, tiling: Tiling) -> Found:
    """Return what was found with the tiles of VAEs; raises what `tiles_of` raises."""
    return replace(found, tiles=tiles_of(tiling, family, found.configs))


def tiles_of(
    tiling: Tiling, family: ModelFamily, configs: Mapping[str, Config]
) -> dict[str, Tiles]:
    """Return the tiles of each component with such a configuration that computes in
    tiles; none where none are asked for.

    Raises UsageError for sides that it cannot take.
    """
    known = components_of(family)
    found = {}
    for name in configs if tiling else ():
        component = known.get(name)
        if component is None or not _takes_tiles(component):
            continue
        own = tiling
        if _is_framewise(_network_class(component)):
            # So it changes no key.
            own = replace(tiling, framewise=False)
        if own:
            found[name] = _tiles(own, component, configs[name])
    return found


def _network_class(component: Component) -> type | None:
    return getattr(component.network, "network_class", None)


def _takes_tiles(component: Component) -> bool:
    return hasattr(_network_class(component), "enable_tiling")


def _is_framewise(vae: object) -> bool:
    """Return whether a VAE goes through the frames of a video in any case: those of
    diffusers that do so keep in a cache what the next frames need.
    """
    return hasattr(vae, "clear_cache")


def _tiles(tiling: Tiling, component: Component, config: Config) -> Tiles:
    # Built without memory: its defaults follow from its configuration.
    vae: Any = empty_component(component, config)
    has_groups = hasattr(vae, "use_framewise_decoding")
    if tiling.framewise and not has_groups:
        what = f"has no effect: {type(vae).__name__} has no groups of frames"
        raise UsageError(FRAMEWISE, what, "leave it out")
    if not tiling.tiled:
        return Tiles(framewise=tiling.framewise)
    name = type(vae).__name__
    if hasattr(vae, "tile_sample_min_height"):
        factor = vae.spatial_compression_ratio
        sides = (vae.tile_sample_min_height, vae.tile_sample_min_width)
        strides = (vae.tile_sample_stride_height, vae.tile_sample_stride_width)
    elif hasattr(vae, "tile_sample_min_size"):
        factor = vae.tile_sample_min_size // vae.tile_latent_min_size
        sides = (vae.tile_sample_min_size,) * 2
        overlap = int(vae.tile_sample_min_size * vae.tile_overlap_factor)
        strides = (vae.tile_sample_min_size - overlap,) * 2
    else:
        what = f"{name} has no tiles whose sides are known"
        raise UsageError("--tiled", what)
    if tiling.size is not None:
        _check_multiple("--tile_size", tiling.size, factor, name)
        ratio = strides[0] / sides[0]
        sides = (tiling.size,) * 2
        # As much of a tile overlaps as by default.
        strides = (max(round(tiling.size * ratio / factor), 1) * factor,) * 2
    if tiling.stride is not None:
        _check_multiple("--tile_stride", tiling.stride, factor, name)
        strides = (tiling.stride,) * 2
    if strides[0] > sides[0]:
        what = f"is {strides[0]}, more than the {sides[0]} pixels of a tile of {name}"
        raise UsageError("--tile_stride", what, "between the tiles would be gaps")
    return Tiles(*sides, *strides, tiling.framewise)


def _check_multiple(flag: str, value: int, factor: int, name: str) -> None:
    if value % factor:
        below = value // factor * factor
        near = f"{below} or {below + factor}" if below else str(factor)
        what = f"{value} is not a multiple of the {factor} pixels that {name} makes one latent of"
        raise UsageError(flag, what, f"for example {near}")
