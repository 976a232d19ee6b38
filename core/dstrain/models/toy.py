"""Write models of toy sizes with random weights, which are read like any model."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dstrain.errors import SystemFault
from dstrain.models.component_files import ModelConfig
from dstrain.models.components import Component
from dstrain.models.formats import same_config, to_checkpoint
from dstrain.registry import ModelFamily

Entries = Mapping[str, Mapping[str, Any]]
"""Name of a component or file -> entries of its JSON."""


def write_toy(
    family: ModelFamily, variant: str, folder: Path
) -> tuple[ModelConfig, ...]:
    """Write a toy model to a temporary folder; returns its files, one entry per
    component with weights.

    Raises SystemFault where the folder's disk is full.
    """
    advice = "set TMPDIR to another folder for temporary files"
    fill_folder(family, variant, 0, folder, advice)
    places = sorted(folder.iterdir())
    weights = [sorted(place.glob("*.safetensors")) for place in places]
    return tuple(ModelConfig(list(map(str, files))) for files in weights if files)


def fill_folder(
    family: ModelFamily, variant: str, seed: int, folder: Path, advice: str
) -> None:
    """Write a toy model as it is published; raises SystemFault, with the advice."""
    try:
        family.load("toy")(folder, variant, seed)
    except SafetensorError as error:
        what = f"a toy model cannot be written: {error}"
        raise SystemFault(folder, what, advice) from error


def toy_writer(
    components: Iterable[Component],
    networks: Entries,
    files: Entries | None = None,
    sharded: Collection[str] = (),
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[..., None]:
    """Return a family's function that writes its toys.

    Args:
        components: Those of the family.
        networks: Component -> content of its config.json, as far as it is not the
            default, or arguments of its tokenizer; others are not written.
        files: Other JSON files of the folder, by path.
        sharded: Components whose weights are written to two files.
        variants: Variant -> its own entries of `networks` and `files`; `like` names a
            variant whose entries it has, too.
    """
    base: dict[str, Entries] = {"networks": networks, "files": files or {}}

    def toy_of(variant: str) -> dict[str, Entries]:
        own = (variants or {}).get(variant)
        if own is None:
            return base
        like = toy_of(own.get("like", ""))
        return {kind: _changed(like[kind], own.get(kind, {})) for kind in base}

    def write(
        folder: Path, variant: str = "", seed: int = 0, sizes: Entries | None = None
    ) -> None:
        """Write a toy of `variant` to `folder`; equal arguments write equal files, and
        torch's generator is left as it was.

        sizes: component -> entries of its config.json that replace the toy's own.
        """
        toy = toy_of(variant)
        for name, content in toy["files"].items():
            _write_json(folder / name, content)
        configs = _changed(toy["networks"], sizes or {})
        written: list[Component] = []
        with torch.random.fork_rng(devices=[]):
            for component in components:
                if component.name not in configs:
                    continue
                config = configs[component.name]
                place = folder / component.folder
                network: Any = component.network
                if component.is_folder:
                    network.create(config).save_pretrained(place)
                    continue
                # Experts are one network twice; their weights must differ.
                copies = sum(component.same_keys_as(other) for other in written)
                written.append(component)
                torch.manual_seed(seed + 1000 * copies)
                built = network.build(component.configure(config))
                _write_config(built, config, place)
                _write_weights(built, component, place, component.name in sharded)

    return write


def _changed(entries: Entries, changes: Entries) -> Entries:
    """Return entries of which some are replaced, or new."""
    names = {**entries, **changes}
    return {name: {**entries.get(name, {}), **changes.get(name, {})} for name in names}


def _write_config(network: nn.Module, config: Mapping[str, Any], place: Path) -> None:
    """Write config.json as the network's library does."""
    library: Any = network
    if hasattr(library, "save_config"):
        library.save_config(place)
    elif hasattr(library, "config"):
        library.config.architectures = [type(library).__name__]
        library.config.save_pretrained(place)
    else:
        _write_json(place / "config.json", config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")


def _write_weights(
    network: nn.Module, component: Component, place: Path, sharded: bool
) -> None:
    # The networks' own save_pretrained writes in one process of several only.
    from huggingface_hub import save_torch_state_dict

    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    state: dict[str, Tensor] = network.state_dict()
    weights = {name: one for name, one in state.items() if name not in tied}
    for checkpoint_format in component.formats:
        is_published = checkpoint_format.configuration is same_config
        if is_published and not checkpoint_format.implies:
            weights = to_checkpoint(checkpoint_format, weights)
    stem = "diffusion_pytorch_model" if hasattr(network, "save_config") else "model"
    size = sum(weight.nbytes for weight in weights.values())
    save_torch_state_dict(
        weights,
        place,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=int(0.6 * size) if sharded else 2 * size,
    )
