"""The folder of a tokenizer or processor that no flag named: beside the weights, or published with a model."""

from collections.abc import Iterable
from pathlib import Path

from dstrain.components import Component, Files
from dstrain.config import Hub
from dstrain.errors import StateError, SystemFault
from dstrain.hubs import Origin, fetch, find_here


def find_folder(
    component: Component, roots: Iterable[Path], origin: Origin | None, default: str, hub: Hub | None
) -> Files:
    """Find the folder of a component: below one of the roots, else in the model, else where the family says.

    default: "ID:FOLDER/", or ''. hub: where that one is fetched from. Neither is asked of a hub if a folder is here.
    Raises StateError if there is none, SystemFault if a hub fails; both name the flag that gives a folder.
    """
    places = [root / folder for root in roots for folder in component.folders]
    model_id, _, published = default.partition(":")
    sources = [(origin, f"{folder}/") for folder in component.folders] if origin is not None else []
    sources += [(Origin(model_id, hub=hub), published)] if model_id else []
    for place in places:
        if place.is_dir() and not any(place == source.folder / folder for source, folder in sources):
            return Files((place,), origin.model_id if origin is not None else "")
    advice = f"give --{component.name}_path FOLDER"
    for get in (find_here, fetch):
        for source, folder in sources:
            try:
                if get(source, folder):
                    return Files((source.folder / folder,), source.model_id)
            except StateError:
                continue
            except SystemFault as fault:
                raise SystemFault(fault.where, fault.what, *fault.help_lines, advice) from fault
    places += [source.folder / folder for source, folder in sources]
    raise StateError(component.name, f"not found in {', '.join(dict.fromkeys(map(str, places)))}", advice)
