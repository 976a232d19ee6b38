"""Original and ComfyUI files of FLUX.2 load into the same networks as those of diffusers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from dstrain.models import components_of, recognize, to_checkpoint
from dstrain.plugin import Files
from dstrain_flux2 import MODEL
from torch import Tensor

from tests.support.layouts import assert_equal, load_as, network_of_noise, saved
from tests.support.toys import toy

COMPONENTS = components_of(MODEL)
KNOWN = tuple(COMPONENTS.values())
UNTIED = {"tie_word_embeddings": False}


def make(name: str, variant: str = "dev", **changes: Any) -> Any:
    """Return a network whose weights, and statistics, differ from each other."""
    network = network_of_noise(COMPONENTS[name], toy("flux2", variant), **changes)
    if name == "vae":
        network.bn.running_mean.normal_()
        network.bn.running_var.uniform_(0.5, 2)
    return network


def original(name: str, network: Any) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes of the original files."""
    old = to_checkpoint(COMPONENTS[name].formats[0], network.state_dict())
    for key, one in old.items():
        if ".attn_1." in key and one.dim() == 2:
            old[key] = one[..., None, None]
    return old


def part_of(path: Path, weights: dict[str, Tensor], name: str) -> Files:
    """Save a file, in which this component alone is; return its part."""
    (((found,), part),) = recognize(Files((saved(path, weights),)), KNOWN)
    assert found is COMPONENTS[name]
    return part


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_an_original_transformer_loads_as_the_network_it_was_made_from(
    prefix: str, path: Path
) -> None:
    network = make("dit")
    weights = {f"{prefix}{key}": one for key, one in original("dit", network).items()}
    part = part_of(path, weights, "dit")
    assert part.prefix == prefix
    loaded = load_as(COMPONENTS["dit"], part, network)
    assert_equal(loaded.state_dict(), network.state_dict())


@pytest.mark.parametrize("variant", ["dev", "klein"])
def test_the_transformers_names_are_those_that_diffusers_converts(variant: str) -> None:
    network = make("dit", variant)
    convert = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers
    assert_equal(convert(original("dit", network)), network.state_dict())


def test_the_original_names_are_the_publishers() -> None:
    """Flux2 of src/flux2/model.py of black-forest-labs/flux2: one block of each kind."""
    network = make("dit", num_single_layers=1)
    found = set(original("dit", network))
    attention = ("qkv", "norm.query_norm", "norm.key_norm", "proj")
    double = [f"{kind}_attn.{one}" for kind in ("img", "txt") for one in attention]
    double += [f"{kind}_mlp.{one}" for kind in ("img", "txt") for one in (0, 2)]
    single = ("linear1", "linear2", "norm.query_norm", "norm.key_norm")
    modules = [f"double_blocks.0.{one}" for one in double]
    modules += [f"single_blocks.0.{one}" for one in single]
    for kind in ("time", "guidance"):
        modules += [f"{kind}_in.in_layer", f"{kind}_in.out_layer"]
    streams = ("double_stream_modulation_img", "double_stream_modulation_txt")
    modules += [f"{one}.lin" for one in (*streams, "single_stream_modulation")]
    modules += ["img_in", "txt_in", "final_layer.linear"]
    modules += ["final_layer.adaLN_modulation.1"]
    ends = {True: "scale", False: "weight"}
    assert found == {f"{one}.{ends[one.endswith('_norm')]}" for one in modules}


def test_an_original_autoencoder_loads_as_the_network_it_was_made_from(
    path: Path,
) -> None:
    network = make("vae")
    part = part_of(path, original("vae", network), "vae")
    loaded = load_as(COMPONENTS["vae"], part, network)
    assert_equal(loaded.state_dict(), network.state_dict())


def test_the_autoencoders_names_are_those_that_diffusers_converts() -> None:
    """But for what the publisher has inside of encoder and decoder, and the statistics."""
    network = make("vae", layers_per_block=2, block_out_channels=[8, 16, 16, 24])
    old = original("vae", network)
    moved = {
        key.replace("encoder.quant", "quant").replace("decoder.post", "post"): one
        for key, one in old.items()
    }
    assert len(set(old) - set(moved)) == 4
    converted = single_file_utils.convert_ldm_vae_checkpoint(
        moved, dict(network.config)
    )
    statistics = {key: one for key, one in old.items() if key.startswith("bn.")}
    assert_equal({**converted, **statistics}, network.state_dict())


@pytest.mark.parametrize("number", [None, 0])
@pytest.mark.parametrize(("variant", "changes"), [("dev", {}), ("klein", UNTIED)])
def test_a_text_encoder_loads_by_the_names_of_either_version_of_its_library(
    variant: str, changes: dict[str, Any], number: int | None, path: Path
) -> None:
    component = COMPONENTS["text_encoder"]
    network = make("text_encoder", variant, **changes)
    weights = dict(network.state_dict())
    if number is not None and variant == "dev":
        weights = to_checkpoint(component.formats[number], weights)
        assert "language_model.lm_head.weight" in weights
    loaded = load_as(component, part_of(path, weights, "text_encoder"), network)
    assert type(loaded) is type(network)
    assert_equal(loaded.state_dict(), network.state_dict())


def test_a_config_that_ties_words_loads_a_file_in_which_they_are_apart(
    path: Path,
) -> None:
    """The published config.json of Mistral does not say that they are apart."""
    component = COMPONENTS["text_encoder"]
    network = make("text_encoder", "dev")
    part = part_of(path, dict(network.state_dict()), "text_encoder")
    content = network.config.to_dict()
    tied = component.configure({**content, "tie_word_embeddings": True})
    loaded: Any = component.network.load(part, tied, torch.float32)
    own, theirs = loaded.model.state_dict(), network.model.state_dict()
    assert_equal(own, theirs)
