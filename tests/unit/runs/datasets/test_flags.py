"""The options of a dataset say how it is read, and a dataset that is not trained on is
read as it is.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig, UsageError
from dstrain.data import AugmentationOptions, Buckets, CaptionOptions, Resolution
from dstrain.registry import load_family
from dstrain.runs.datasets.flags import (
    ORDERS,
    caption_inputs,
    data_config,
    file_keys,
    most_frames,
    previewed_prompts,
    resolutions_of,
)

QWEN_IMAGE = load_family("qwen_image").spec("base")


def config_of(**options: Any) -> TrainConfig:
    return TrainConfig(model="qwen_image", **options)


def test_a_dataset_without_a_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="--dataset_base_path: is required"):
        data_config(config_of(), QWEN_IMAGE)


def test_each_resolution_has_buckets_of_its_own() -> None:
    found = resolutions_of(config_of(resolution="64,96", bucket_step=8))
    fixed = Resolution(None, None, config_of().max_pixels)
    assert found == tuple(
        replace(fixed, buckets=Buckets(side, 8, None, None, False)) for side in (64, 96)
    )


def test_without_buckets_there_is_one_size() -> None:
    config = config_of(height=64, width=96)
    assert resolutions_of(config) == (Resolution(64, 96, config.max_pixels),)


def test_clips_have_at_most_the_greatest_of_several_numbers_of_frames() -> None:
    config = config_of(num_frames="33,17", dataset_base_path=Path("videos"))
    assert most_frames(config) == 33
    sampling = data_config(config, QWEN_IMAGE).sampling
    assert (sampling.frames, sampling.shorter) == (33, (17,))


def test_columns_that_only_other_variants_have_may_be_named() -> None:
    base = load_family("qwen_image").spec("base")
    config = config_of(
        dataset_base_path=Path("data"), data_file_keys="image,edit_image,edit_imag"
    )
    assert data_config(config, base).file_keys == ("image", "edit_imag")
    edit = load_family("qwen_image").spec("edit")
    assert data_config(config, edit).file_keys == ("image", "edit_image", "edit_imag")


def test_the_caption_is_what_guidance_has_a_counterpart_of() -> None:
    assert caption_inputs(QWEN_IMAGE) == {"prompt"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"trigger_word": "sks"}, "a sks dog"),
        ({}, "a [trigger] dog"),
        (
            {"dataset": ({"dataset_base_path": "b", "trigger_word": "tok"},)},
            "a tok dog",
        ),
    ],
)
def test_previews_have_the_word_that_is_trained(
    words: dict[str, Any], expected: str
) -> None:
    prompts = ["a [trigger] dog", "a cat"]
    config = config_of(dataset_base_path="a", preview_prompt=prompts, **words)
    # A prompt without it stays as it is: it shows what else has changed.
    assert previewed_prompts(config) == (expected, "a cat")


def test_a_validation_dataset_has_neither_dropout_nor_tags_nor_views_of_its_own() -> (
    None
):
    config = config_of(
        dataset_base_path=Path("photos"),
        caption_prefix="a ",
        caption_dropout=0.5,
        shuffle_tags=True,
        flip=True,
        crops=2,
    )
    trained_on = data_config(config, QWEN_IMAGE)
    assert trained_on.augmentation == AugmentationOptions(True, 2)
    assert trained_on.captions == CaptionOptions(
        prefix="a ", dropout=0.5, shuffle_tags=True, variants=ORDERS
    )
    held_out = data_config(config, QWEN_IMAGE, is_validation=True)
    assert held_out.augmentation == AugmentationOptions()
    assert held_out.captions == CaptionOptions(prefix="a ")


def test_columns_of_other_variants_may_be_named_where_a_plugin_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []

    def loaded(name: str, disabled: tuple[str, ...]) -> Any:
        asked.append(disabled)
        return load_family(name)

    monkeypatch.setattr("dstrain.runs.datasets.flags.load_family", loaded)
    named = config_of(
        data_file_keys="image,edit_image,none", disabled_plugins=("other",)
    )
    assert file_keys(named, QWEN_IMAGE) == ("image", "none")
    assert asked == [("other",)]
