"""The demo's model: a Qwen-Image of 2.5 million parameters with random weights, and the
small VAE of this folder.

python demo/model.py FOLDER
"""

import shutil
from pathlib import Path

import click
from dstrain_qwen_image import toy

DIT = {
    "num_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "axes_dims_rope": (8, 12, 12),
}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Write the model to FOLDER, in the published layout."""
    toy.write(folder, "base", 0, {"dit": DIT})
    shutil.rmtree(folder / "vae")
    shutil.copytree(Path(__file__).parent / "vae", folder / "vae")


if __name__ == "__main__":
    main()
