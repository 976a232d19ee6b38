"""Let VAEs compute large images in tiles: sides of tiles that each of them can take."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from dstrain.plugin import (
    Component,
    Identity,
    Keeper,
    KeeperRequest,
    UsageError,
    get_logger,
)
from dstrain.plugin.functional import empty_component
from torch import nn

from dstrain_memory.options import MemoryOptions
from dstrain_memory.tiles import Tiles

logger = get_logger("dstrain.memory")
FRAMEWISE = "--framewise_decoding"
NO_NAMES: Mapping[str, Collection[str]] = MappingProxyType({})


@dataclass(frozen=True)
class Tiling:
    """What a run asks of its VAEs; None leaves a value to the VAE."""

    tiled: bool = False
    size: int | None = None
    """Side of a tile in pixels."""
    stride: int | None = None
    """Pixels from one tile to the next."""
    framewise: bool = False

    def __bool__(self) -> bool:
        return self.tiled or self.framewise


def tiling(request: KeeperRequest, options: MemoryOptions) -> list[Keeper]:
    """Return the keeper that --tiled and --framewise_decoding ask for, if they do.

    Raises UsageError where no component of the variant can compute in tiles; logs what is
    asked for and done in any case.
    """
    asked = Tiling(
        options.tiled,
        options.tile_size,
        options.tile_stride,
        options.framewise_decoding,
    )
    if not asked:
        return []
    known = request.components
    vaes = {one: known[one] for one in request.of_variant if _takes_tiles(known[one])}
    if not vaes:
        flag = "--tiled" if asked.tiled else FRAMEWISE
        raise UsageError(
            flag, f"has no effect: {request.variant} has no VAE with tiling"
        )
    if asked.framewise and any(map(_is_framewise, map(_network_class, vaes.values()))):
        logger.info(f"{FRAMEWISE}: the VAE of {request.variant} does so in any case")
    return [Tile(asked, vaes)]


@dataclass(eq=False)
class Tile(Keeper):
    """Lets VAEs compute in tiles."""

    asked: Tiling
    vaes: Mapping[str, Component]

    def __post_init__(self) -> None:
        self.kind = "tile"
        self.flag = "--tiled" if self.asked.tiled else FRAMEWISE
        self.components = tuple(self.vaes)

    def identity(
        self, component: str, config: Mapping[str, Any] | None
    ) -> Identity | None:
        """Return the sides of its tiles.

        Raises UsageError for sides that it cannot take.
        """
        if config is None:
            return None
        # Built without memory: its defaults follow from its configuration.
        tiles = self._tiles(component, empty_component(self.vaes[component], config))
        if tiles is None:
            return None
        return Identity("tiles", tiles.identity, f"tiles of {component}")

    def check(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Let VAEs without memory compute in tiles, too: then their bytes are counted so."""
        self.prepared(networks, device)

    def prepared(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        saved: Mapping[str, Collection[str]] = NO_NAMES,
    ) -> None:
        """Let VAEs compute in tiles from now on."""
        for name, network in networks.items():
            tiles = self._tiles(name, network)
            if tiles is not None:
                tiles.apply(network)

    def _tiles(self, component: str, vae: Any) -> Tiles | None:
        asked = self.asked
        if _is_framewise(_network_class(self.vaes[component])):
            # So it changes no key.
            asked = replace(asked, framewise=False)
        return _tiles(asked, vae) if asked else None


def _network_class(component: Component) -> type | None:
    return getattr(component.network, "network_class", None)


def _takes_tiles(component: Component) -> bool:
    return hasattr(_network_class(component), "enable_tiling")


def _is_framewise(vae: object) -> bool:
    """Return whether a VAE goes through the frames of a video in any case: those of
    diffusers that do so keep in a cache what the next frames need.
    """
    return hasattr(vae, "clear_cache")


def _tiles(tiling: Tiling, vae: Any) -> Tiles:
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
