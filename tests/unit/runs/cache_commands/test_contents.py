"""The contents of a cache are all of its values and plans, as numbers."""

import numpy as np
import pytest
from dstrain.cache import FeatureCache, as_text
from dstrain.runs import listing, prune
from dstrain.runs.cache_commands.contents import ABSENT, LITERAL, Contents
from dstrain.runs.cache_commands.verify import verified

from tests.support.caching_project import Place, write_rows


def test_every_value_has_its_bytes_and_its_shard(shared_place: Place) -> None:
    contents = Contents.of(shared_place.cache)
    cache = FeatureCache.open(shared_place.cache)
    assert [as_text(one) for one in contents.addresses] == list(cache)
    assert [path.name for path in contents.shards] == [
        path.name for path in shared_place.shards
    ]
    bytes_of_tensors = contents.nbytes.sum()
    on_disk = sum(path.stat().st_size for path in shared_place.shards)
    assert 0 < bytes_of_tensors < on_disk
    assert set(contents.shard.tolist()) == set(range(len(contents.shards)))


def test_a_plan_names_the_value_of_each_sample(shared_place: Place) -> None:
    contents = Contents.of(shared_place.cache)
    (plan,) = contents.plans
    assert plan.rows.tolist() == [0, 1, 2, 3]
    assert plan.lines.tolist() == [2, 3, 4, 5]
    prompts = plan.values["prompt_emb"]
    assert prompts[2] == prompts[3]
    assert len(np.unique(prompts)) == 3
    assert set(plan.values["label"].tolist()) == {LITERAL}
    assert ABSENT not in np.concatenate(list(plan.values.values()))
    assert contents.used_by([plan]).all()
    assert not contents.used_by([]).any()


def test_a_value_belongs_to_its_unit(shared_place: Place) -> None:
    (plan,) = Contents.of(shared_place.cache).plans
    assert plan.unit_of("prompt_emb") == "encode_prompt"
    assert plan.unit_of("negative.prompt_emb") == "encode_prompt"
    assert plan.unit_of("label") == "(input)"


def test_a_value_whose_shard_is_gone_is_absent(place: Place) -> None:
    place.shards[0].unlink()
    (plan,) = Contents.of(place.cache).plans
    assert ABSENT in np.concatenate(list(plan.values.values()))
    assert plan.used.size == 0 or plan.used.min() >= 0


def test_values_that_the_index_does_not_cover_are_counted_as_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ended before it wrote the index leaves the values of other rows beside
    it.
    """
    place.fill()
    before = listing(place.cache)
    write_rows(
        place.data, [{**row, "prompt": f"other {row['prompt']}"} for row in place.rows]
    )

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FeatureCache, "write_index", stopped)
        with pytest.raises(KeyboardInterrupt):
            place.fill()
    write_rows(place.data, place.rows)
    cache = FeatureCache.open(place.cache)
    assert all(len(part) for part in cache.parts)
    contents = Contents.of(place.cache)
    (plan,) = contents.plans
    samples = cache.plan_rows(plan.path)
    for name, numbers in plan.values.items():
        for sample, number in zip(samples, numbers.tolist(), strict=True):
            form = sample["values"].get(name)
            if form is not None and "at" in form:
                assert as_text(contents.addresses[number]) == form["at"]
    assert listing(place.cache)["plans"] == before["plans"]
    prune(place.cache, [], True, None)
    assert verified(place.cache).problems == ()
    place.stored()
