"""--toy: the family at toy sizes with random weights, written to a temporary folder and
read like any model.
"""

from pathlib import Path

from safetensors import SafetensorError

from dstrain.errors import SystemFault
from dstrain.models.locate import ModelConfig
from dstrain.registry.family import ModelFamily


def write_toy(
    family: ModelFamily, variant: str, folder: Path
) -> tuple[ModelConfig, ...]:
    """Write a toy model to a temporary folder; returns its files, one entry per
    component with weights.

    Raises SystemFault where the folder's disk is full.
    """
    fill_folder(
        family,
        variant,
        0,
        folder,
        "TMPDIR=DIR before the command names another folder for temporary files",
    )
    parts = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    weights = [sorted(path.glob("*.safetensors")) for path in parts]
    return tuple(
        ModelConfig(path=[str(file) for file in files]) for files in weights if files
    )


def fill_folder(
    family: ModelFamily, variant: str, seed: int, folder: Path, advice: str
) -> None:
    """Write a toy model in the published layout; raises SystemFault, with the advice,
    where the disk is full.
    """
    try:
        family.load("toy")(folder, variant, seed)
    except SafetensorError as error:
        raise SystemFault(
            str(folder), f"a toy model cannot be written: {error}", advice
        ) from error
