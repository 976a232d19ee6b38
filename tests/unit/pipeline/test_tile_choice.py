"""What is asked of VAEs becomes sides that each can take, equal however they are written,
or is refused by the flag.
"""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.models import Found, component_digests
from dstrain.models.execution import Tiles
from dstrain.pipeline import Tiling, check_tiling, tiles_of, with_tiles
from dstrain.plugin import Component, DiffusersNetwork, Files, Tokenizer
from torch import nn

from tests.support.command_lines import toy_config

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
FAMILY: Any = SimpleNamespace(load={"components": COMPONENTS}.__getitem__)


def variant(*components: str) -> Any:
    return SimpleNamespace(components=components, where="fake base")


def sides(tiling: Tiling, configs: Any = CONFIGS) -> dict[str, Tiles]:
    return tiles_of(tiling, FAMILY, configs)


def test_the_flags_ask_for_it() -> None:
    config = toy_config(tiled=True, tile_size=64, tile_stride=32)
    assert Tiling.of(config) == Tiling(True, 64, 32)
    assert Tiling.of(toy_config(framewise_decoding=True)) == Tiling(framewise=True)
    assert not Tiling.of(toy_config()) and not Tiling()


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
    check_tiling(Tiling(True), FAMILY, variant("dit", "vae"))
    assert not capsys.readouterr().err
    check_tiling(Tiling(framewise=True), FAMILY, variant("dit", "vae"))
    assert "--framewise_decoding: " in capsys.readouterr().err


def test_a_variant_without_such_a_vae_is_refused() -> None:
    known = variant("dit", "tokenizer")
    check_tiling(Tiling(), FAMILY, known)
    for tiling, flag in (
        (Tiling(True), "--tiled: .*fake base "),
        (Tiling(framewise=True), "--framewise_decoding: .*fake base "),
    ):
        with pytest.raises(UsageError, match=flag):
            check_tiling(tiling, FAMILY, known)


def test_only_the_digests_of_vaes_change_and_equal_tiles_have_equal_ones() -> None:
    files = {name: Files(()) for name in ("vae", "dit")}
    found = Found(files, {"vae": VIDEO, "dit": {}})
    digests: Any = SimpleNamespace(of_all=lambda paths: "files")

    def digest(tiling: Tiling) -> dict[str, str]:
        return component_digests(with_tiles(found, FAMILY, tiling), digests)

    plain, tiled = digest(Tiling()), digest(Tiling(True))
    assert {name for name in plain if plain[name] != tiled[name]} == {"vae"}
    assert digest(Tiling(True, 256, 192)) == tiled
    assert digest(Tiling(True, 128)) != tiled
