"""What is asked of VAEs becomes sides that each can take, equal however they are written,
or is refused by the flag.
"""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.graph.keepers import Keepers
from dstrain.models.needed_components import Found, component_digests
from dstrain.plugin import Component, DiffusersNetwork, Files, KeeperRequest, Tokenizer
from dstrain_memory.options import MemoryOptions
from dstrain_memory.tiles import Tiles
from dstrain_memory.tiling import Tile, Tiling, tiling as tiling_of
from torch import nn

VIDEO = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}
IMAGE = {
    "block_out_channels": [8, 8, 16, 16],
    "norm_num_groups": 4,
    "sample_size": 64,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}


class Grouped(nn.Module):
    """A VAE that can compute frames in groups, and no tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.use_framewise_decoding = False

    def enable_tiling(self) -> None:
        """Nothing that is known."""


COMPONENTS = (
    Component("vae", DiffusersNetwork("AutoencoderKLWan"), "vae", ("*",)),
    Component("image_vae", DiffusersNetwork("AutoencoderKL"), "image_vae", ("*",)),
    Component("grouped", DiffusersNetwork(f"{__name__}:Grouped"), "grouped", ("*",)),
    Component("dit", DiffusersNetwork("WanTransformer3DModel"), "dit", ("*",)),
    Component("tokenizer", Tokenizer("T5Tokenizer"), "tokenizer"),
)
CONFIGS = MappingProxyType({"vae": VIDEO, "image_vae": IMAGE})
KNOWN = {one.name: one for one in COMPONENTS}
VAES = {name: KNOWN[name] for name in ("vae", "image_vae", "grouped")}


def asked(options: MemoryOptions, *components: str) -> list[Any]:
    """The keepers that options ask for in a variant with these components."""
    request = KeeperRequest(
        None, KNOWN, lambda *_: (), of_variant=components, variant="fake base"
    )
    return [*tiling_of(request, options)]


def sides(tiling: Tiling, configs: Any = CONFIGS) -> dict[str, Tiles]:
    keeper = Tile(tiling, VAES)
    found = {}
    for name in VAES.keys() & configs.keys():
        identity = keeper.identity(name, configs[name])
        if identity is not None:
            found[name] = Tiles(**identity.value)
    return found


def test_the_flags_ask_for_it() -> None:
    options = MemoryOptions(tiled=True, tile_size=64, tile_stride=32)
    (keeper,) = asked(options, *KNOWN)
    assert keeper.asked == Tiling(True, 64, 32)
    assert {*keeper.components} == {*VAES}
    (keeper,) = asked(MemoryOptions(framewise_decoding=True), *KNOWN)
    assert keeper.asked == Tiling(framewise=True)
    assert not asked(MemoryOptions(), *KNOWN) and not Tiling()


def test_the_defaults_are_those_of_each_vae_and_can_be_spelled_out() -> None:
    video, image = Tiles(256, 256, 192, 192), Tiles(64, 64, 48, 48)
    assert sides(Tiling(True)) == {"vae": video, "image_vae": image}
    for size, stride in ((256, None), (None, 192), (256, 192)):
        assert sides(Tiling(True, size, stride), {"vae": VIDEO}) == {"vae": video}
    spelled = sides(Tiling(True, 64, 48), {"image_vae": IMAGE})
    assert spelled == {"image_vae": image}
    assert sides(Tiling()) == {}


@pytest.mark.parametrize(
    ("size", "stride", "found"),
    [
        (128, None, (128, 96)),
        (8, None, (8, 8)),
        (40, None, (40, 32)),
        (128, 128, (128, 128)),
        (512, 8, (512, 8)),
    ],
)
def test_a_side_without_its_stride_overlaps_as_much(
    size: int, stride: int | None, found: tuple[int, int]
) -> None:
    (tiles,) = sides(Tiling(True, size, stride), {"vae": VIDEO}).values()
    assert (tiles.height, tiles.stride_height) == found
    assert (tiles.width, tiles.stride_width) == found


@pytest.mark.parametrize(
    ("tiling", "configs", "said"),
    [
        (Tiling(True, 60), CONFIGS, r"--tile_size: .*60 .*8 "),
        (Tiling(True, 64, 4), CONFIGS, r"--tile_stride: .*4 .*8"),
        (Tiling(True, None, 200), CONFIGS, r"--tile_stride: .*200.*64"),
        (Tiling(framewise=True), CONFIGS, r"--framewise_decoding: .*AutoencoderKL "),
        (Tiling(True), {"grouped": {}}, r"--tiled: .*Grouped "),
    ],
)
def test_what_a_vae_cannot_take_is_refused_by_the_flag(
    tiling: Tiling, configs: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        sides(tiling, configs)


def test_groups_of_frames_are_of_a_vae_that_has_them() -> None:
    found = sides(Tiling(framewise=True), {"grouped": {}, "dit": {}})
    assert found == {"grouped": Tiles(framewise=True)}


def test_what_goes_through_frames_in_any_case_says_so_and_keeps_its_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    video = {"vae": VIDEO}
    assert sides(Tiling(framewise=True), video) == {}
    assert sides(Tiling(True, framewise=True), video) == sides(Tiling(True), video)
    asked(MemoryOptions(tiled=True), "dit", "vae")
    assert not capsys.readouterr().err
    asked(MemoryOptions(framewise_decoding=True), "dit", "vae")
    assert "--framewise_decoding: " in capsys.readouterr().err


def test_a_variant_without_such_a_vae_is_refused() -> None:
    known = ("dit", "tokenizer")
    assert not asked(MemoryOptions(), *known)
    for options, flag in (
        (MemoryOptions(tiled=True), "--tiled: .*fake base "),
        (MemoryOptions(framewise_decoding=True), "--framewise_decoding: .*fake base "),
    ):
        with pytest.raises(UsageError, match=flag):
            asked(options, *known)


def test_only_the_digests_of_vaes_change_and_equal_tiles_have_equal_ones() -> None:
    files = {name: Files(()) for name in ("vae", "dit")}
    found = Found(files, {"vae": VIDEO, "dit": {}})
    digests: Any = SimpleNamespace(of_all=lambda paths: "files")

    def digest(tiling: Tiling) -> dict[str, str]:
        keepers = Keepers((Tile(tiling, VAES),))
        return component_digests(found.kept(keepers), digests)

    plain, tiled = component_digests(found, digests), digest(Tiling(True))
    assert {name for name in plain if plain[name] != tiled[name]} == {"vae"}
    assert digest(Tiling(True, 256, 192)) == tiled
    assert digest(Tiling(True, 128)) != tiled
