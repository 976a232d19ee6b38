"""Tests of saved files and of inference."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dstrain.models import assign
from dstrain.models.weights import find_weights
from dstrain.testing.compare import EXACT, greatest_difference
from dstrain.testing.contract import Contract, Published
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.round_trips import generate, pixels, train_and_save
from dstrain.testing.rows import arguments, least_sizes
from dstrain.testing.trained_sets import TrainedSet, denoisers


class Saved(Contract):
    """A run saves what it trained, and inference equals the published pipeline."""

    def test_a_lora_file_gives_back_what_was_trained(
        self, tested: FamilyUnderTest, adapted: str, tmp_path: Path
    ) -> None:
        """A fresh pipeline with the file predicts bit for bit as the trained one; and
        it generates.
        """
        ended = train_and_save(tested, TrainedSet(lora=adapted), tmp_path)
        assert not torch.equal(*ended.predictions(tested.pipeline))
        pipeline = tested.open()
        pipeline.load_lora(ended.file)
        assert torch.equal(*ended.predictions(pipeline))
        generate(pipeline, arguments(pipeline.spec, guided=False))

    def test_a_checkpoint_gives_back_what_was_trained(
        self, tested: FamilyUnderTest, component: str, tmp_path: Path
    ) -> None:
        """The same holds for a component trained in full, whose weights have published
        names.
        """
        ended = train_and_save(tested, TrainedSet((component,)), tmp_path)
        known = tested.family.load("components")
        published = find_weights(
            assign(tested.models, known, [component])[component].paths
        )
        assert load_file(ended.file).keys() == published.keys()
        assert not torch.equal(*ended.predictions(tested.pipeline))
        pipeline = tested.open(tested.with_file(component, ended.file))
        assert torch.equal(*ended.predictions(pipeline))
        generate(pipeline, arguments(pipeline.spec, guided=False))

    def test_inference_makes_what_was_asked_for(
        self, tested: FamilyUnderTest, guided: bool
    ) -> None:
        """The result has the size asked for, and is the same again for the same seed."""
        given = arguments(tested.spec, guided)
        latents, made = generate(tested.pipeline, given)
        assert len(latents) == given["num_inference_steps"]
        assert all(bool(one.isfinite().all()) for one in latents)
        size = list(pixels(made).shape[1:3])
        assert size == [
            given.get(side, pixel)
            for side, pixel in zip(("height", "width"), size, strict=True)
        ]
        again, _ = generate(tested.pipeline, given)
        assert all(map(torch.equal, latents, again))

    def test_the_least_sizes_are_made_as_asked_for(
        self, tested: FamilyUnderTest
    ) -> None:
        """Images and videos have the size and the frames asked for, at the least sizes
        that the columns allow.
        """
        for size in least_sizes(tested.spec):
            given = arguments(tested.spec, guided=False, size=size)
            given["num_inference_steps"] = 1
            _, made = generate(tested.pipeline, given)
            found = pixels(made).shape
            frames = len(made) if tested.spec.makes_layers else 1
            frames = size.frames if tested.spec.makes_video else frames
            wanted = (frames, size.height, size.width)
            assert tuple(found[:3]) == wanted, (
                f"asked for {size}: made {found[1]} x {found[2]}, {found[0]} frames; "
                "is a column's `multiple` or `frame_multiple` not the VAE's?"
            )

    def test_every_step_equals_that_of_the_published_pipeline(
        self, tested: FamilyUnderTest, guided: bool, reference: Published
    ) -> None:
        """Latents differ by at most 1e-5 of their greatest, or of 1; pixels by at most 1 of
        255.
        """
        pipeline = tested.open()
        most = self.published_images
        given: dict[str, Any] = {
            name: value[:most] if isinstance(value, list) else value
            for name, value in arguments(tested.spec, guided).items()
        }
        with torch.no_grad():  # the default initialization hardly listens to conditions
            for name in denoisers(tested.family, tested.spec):
                for weight in pipeline.components[name].parameters():
                    weight.mul_(2 if weight.ndim > 1 else 1)
        latents, made = generate(pipeline, given)
        noise = torch.randn(
            latents[0].shape, generator=torch.Generator().manual_seed(given.pop("seed"))
        )
        theirs, image = reference(pipeline, tested.model, {**given, "latents": noise})
        for step, (one, other) in enumerate(zip(latents, theirs, strict=True), 1):
            difference, where = greatest_difference(one, other)
            near = EXACT * max(1.0, float(other.abs().max()))
            assert difference <= near, f"latents after step {step} differ {where}"
        difference, where = greatest_difference(pixels(made), pixels(image))
        assert difference <= 1, f"pixels differ {where}"
