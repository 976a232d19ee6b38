"""Images by the demo's model: every digit several times, with the pipeline that
trained it.

python demo/images.py MODEL_FOLDER DIT.safetensors OUTPUT [--lora FILE] [--words ",
red ink on yellow paper"]
"""

from pathlib import Path

import click
from digits import NAMES, SIZE
from dstrain import ModelConfig, Pipeline


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.argument("dit", type=click.Path(path_type=Path, exists=True))
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--lora", type=click.Path(path_type=Path, exists=True), help="LoRA file to add."
)
@click.option("--words", default="", help="End of every prompt.")
@click.option("--each", default=5, help="Images of each digit.")
@click.option("--steps", default=20, help="Denoising steps.")
def main(
    model: Path,
    dit: Path,
    output: Path,
    lora: Path | None,
    words: str,
    each: int,
    steps: int,
) -> None:
    """Write OUTPUT/7-03.png and so on: the file name begins with the digit that was
    asked for.
    """
    files = [
        dit,
        *model.glob("text_encoder/*.safetensors"),
        *model.glob("vae/*.safetensors"),
    ]
    pipe = Pipeline.from_pretrained(
        "qwen_image", [ModelConfig(str(file)) for file in files], "base"
    )
    if lora is not None:
        pipe.load_lora(lora)
    output.mkdir(parents=True, exist_ok=True)
    for digit, name in enumerate(NAMES):
        for number in range(each):
            image = pipe(
                prompt=f"a picture of the number {name}{words}",
                height=SIZE,
                width=SIZE,
                num_inference_steps=steps,
                guidance_scale=1.0,
                seed=100 * digit + number,
            )
            image.save(output / f"{digit}-{number:02}.png")


if __name__ == "__main__":
    main()
