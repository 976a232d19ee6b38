"""What is asked of VAEs becomes sides that each can take, equal however they are written,
or is refused in words.
"""

import logging
from types import MappingProxyType
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
IMAGE = {"block_out_channels": [8, 8, 16, 16], "norm_num_groups": 4, "sample_size": 64,
         "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}  # fmt: skip


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


class Family:
    """A family with these components."""

    def load(self, name: str) -> Any:
        """Return what a record names."""
        assert name == "components"
        return COMPONENTS


class Spec:
    """A variant with some of them."""

    where = "fake base"

    def __init__(self, *components: str) -> None:
        self.components = components


FAMILY: Any = Family()


def sides(tiling: Tiling, configs: Any = CONFIGS) -> dict[str, Tiles]:
    return tiles_of(tiling, FAMILY, configs)


def test_the_flags_ask_for_it() -> None:
    config = toy_config(tiled=True, tile_size=64, tile_stride=32)
    assert Tiling.of(config) == Tiling(True, 64, 32)
    assert Tiling.of(toy_config(framewise_decoding=True)) == Tiling(framewise=True)
    assert not Tiling.of(toy_config()) and not Tiling()


def test_the_defaults_are_those_of_each_vae_and_can_be_spelled_out() -> None:
    defaults = sides(Tiling(True))
    assert defaults == {
        "vae": Tiles(256, 256, 192, 192),
        "image_vae": Tiles(64, 64, 48, 48),
    }
    one = {"vae": VIDEO}
    wanted = {"vae": defaults["vae"]}
    for size, stride in ((256, None), (None, 192), (256, 192)):
        assert sides(Tiling(True, size, stride), one) == wanted
    assert sides(Tiling(True, 64, 48), {"image_vae": IMAGE}) == {
        "image_vae": defaults["image_vae"]
    }
    assert sides(Tiling()) == {}


@pytest.mark.parametrize(
    ("size", "stride", "found"),
    [
        (128, None, (128, 96)),
        (8, None, (8, 8)),
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
    ("tiling", "configs", "where", "what"),
    [
        (Tiling(True, 60), CONFIGS, "--tile_size", "60 is not a multiple of the 8 pixels"),
        (Tiling(True, 64, 4), CONFIGS, "--tile_stride", "4 is not a multiple of the 8"),
        (Tiling(True, None, 200), CONFIGS, "--tile_stride", "is 200, more than the 64"),
        (Tiling(framewise=True), CONFIGS, "--framewise_decoding", "AutoencoderKL has no groups"),
        (Tiling(True), {"grouped": {}}, "--tiled", "Grouped has no tiles"),
    ],
)  # fmt: skip
def test_what_a_vae_cannot_take_is_refused_in_words(
    tiling: Tiling, configs: Any, where: str, what: str
) -> None:
    with pytest.raises(UsageError) as caught:
        sides(tiling, configs)
    assert caught.value.where == where
    assert what in caught.value.what


def test_groups_of_frames_are_of_a_vae_that_has_them() -> None:
    found = sides(Tiling(framewise=True), {"grouped": {}, "dit": {}})
    assert found == {"grouped": Tiles(framewise=True)}


def test_what_goes_through_frames_in_any_case_says_so_and_keeps_its_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    video = {"vae": VIDEO}
    assert sides(Tiling(framewise=True), video) == {}
    assert sides(Tiling(True, framewise=True), video) == sides(Tiling(True), video)
    spec: Any = Spec("dit", "vae")
    with caplog.at_level(logging.INFO):
        check_tiling(Tiling(framewise=True), FAMILY, spec)
        check_tiling(Tiling(True), FAMILY, spec)
    said = "--framewise_decoding: the VAE of fake base does so in any case"
    assert [one.message for one in caplog.records] == [said]


def test_a_variant_without_such_a_vae_is_refused() -> None:
    known: Any = Spec("dit", "tokenizer")
    check_tiling(Tiling(), FAMILY, known)
    for tiling, flag in (
        (Tiling(True), "--tiled"),
        (Tiling(framewise=True), "--framew"),
    ):
        with pytest.raises(
            UsageError, match="fake base has no VAE with tiling"
        ) as caught:
            check_tiling(tiling, FAMILY, known)
        assert caught.value.where.startswith(flag)
    other: Any = Spec("dit", "vae")
    check_tiling(Tiling(True), FAMILY, other)


def test_only_the_digests_of_vaes_change_and_equal_tiles_have_equal_ones() -> None:
    files = {name: Files(()) for name in ("vae", "dit")}
    found = Found(files, {"vae": VIDEO, "dit": {}})
    digests: Any = type("", (), {"of_all": lambda self, paths: "files"})()

    def digest(tiling: Tiling) -> dict[str, str]:
        return component_digests(with_tiles(found, FAMILY, tiling), digests)

    plain, tiled = digest(Tiling()), digest(Tiling(True))
    assert {name for name in plain if plain[name] != tiled[name]} == {"vae"}
    assert digest(Tiling(True, 256, 192)) == tiled
    assert digest(Tiling(True, 128)) != tiled
