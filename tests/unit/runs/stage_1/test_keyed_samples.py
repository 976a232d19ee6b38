"""Values have one key wherever they are equal, and only what the cache lacks is work."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from dstrain.cache import FeatureCache
from dstrain.runs.stage_1.keyed_samples import addresses_of, key_rows, missing_work

from tests.support.caching_project import Place, filled_place, noise_image, write_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A filled cache; the last two of its four rows have one prompt."""
    with filled_place(tmp_path_factory.mktemp("keyed")) as place:
        yield place


def test_rows_that_share_an_input_share_the_keys_of_its_values(place: Place) -> None:
    *_, one, other = key_rows(place.setup()).samples
    shared = {
        name for name in one.addresses if one.addresses[name] == other.addresses[name]
    }
    assert {"prompt_emb", "facts", "title"} <= shared
    assert "input_latents" in one.addresses.keys() - shared
    # Neither are inputs that are no file stored: the plan file has them.
    assert "label" not in one.addresses


def test_nothing_is_missing_in_a_filled_cache(place: Place) -> None:
    keyed = key_rows(place.setup())
    cache = FeatureCache.open(place.cache)
    assert list(missing_work(keyed.samples, cache)) == []
    stored = {one for _, addresses in addresses_of(keyed) for one in addresses}
    assert stored == set(cache)


def test_what_is_new_is_work_of_the_first_row_that_needs_it(
    place: Place, tmp_path: Path
) -> None:
    noise_image(9).save(place.data / "new.png")
    old = place.rows[0]
    write_rows(
        place.data,
        [
            old,
            {**old, "image": "new.png"},
            {**old, "image": "new.png", "prompt": "new"},
        ],
    )
    keyed = key_rows(place.setup())
    missing = missing_work(keyed.samples, FeatureCache.open(place.cache))
    assert missing.components == {"text_encoder", "tokenizer", "vae"}
    work = list(missing)
    assert [one.sample.sample_id for one in work] == [(1, 0), (2, 0)]
    assert [[step.unit.name for step in one.steps] for one in work] == [
        ["encode_image"],
        ["encode_prompt", "describe"],
    ]
    assert [one.inputs for one in work] == [{"input_image"}, {"prompt"}]


def test_only_components_that_compute_what_is_missing_are_asked_for(
    place: Place,
) -> None:
    noise_image(9).save(place.data / "new.png")
    write_rows(place.data, [place.rows[0], {**place.rows[0], "image": "new.png"}])
    keyed = key_rows(place.setup())
    missing = missing_work(keyed.samples, FeatureCache.open(place.cache))
    assert missing.components == {"vae"}


def test_work_is_made_when_it_is_used(place: Place, tmp_path: Path) -> None:
    """What is kept of a sample are its addresses and what of them is missing."""
    keyed = key_rows(place.setup())
    FeatureCache.create(tmp_path / "empty")
    work = missing_work(keyed.samples, FeatureCache.open(tmp_path / "empty"))
    ids = [sample.sample_id for sample in keyed.samples]
    assert [one.sample.sample_id for one in work[1:]] == ids[1:]
    assert work[0].sample is not work[0].sample
    made = [one.sample.addresses[name] for one in work for name in one.values]
    wanted = {one for _, addresses in addresses_of(keyed) for one in addresses}
    assert len(made) == len(wanted) and set(made) == wanted
