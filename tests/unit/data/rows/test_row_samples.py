"""A row gives one sample, or one for each clip of its videos; each has its variants."""

from dstrain.data import AugmentationOptions, Cell, FrameSampling
from dstrain.data.rows.loaded import LoadedRow
from dstrain.data.rows.row_samples import clips_of, distinct, variants_of


class Compared(str):
    """The path of a video that counts how often it is compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def clip(path: str, start: int) -> dict[str, Cell]:
    return {"video": Cell("video", None, (path,), (("frames", (start,)),))}


def test_many_clips_of_a_video_are_not_compared_with_each_other() -> None:
    clips = [clip(Compared("a.mp4"), start) for start in range(2000)]
    twice = [one for one in clips for _ in range(2)]
    Compared.count = 0
    assert len(list(distinct(twice))) == len(clips)
    assert Compared.count < 3 * len(clips)


def test_clips_that_show_the_same_are_one_sample() -> None:
    clips = [clip("a.mp4", 0), clip("a.mp4", 1), clip("b.mp4", 0)]
    assert list(distinct([*clips, *clips])) == clips


def test_a_row_without_videos_is_one_sample() -> None:
    assert list(clips_of({}, FrameSampling())) == [{}]


def test_a_sample_has_each_caption_in_each_view() -> None:
    row = LoadedRow(captions={"prompt": [(3, "a"), (1, "b")]})
    cells = {"prompt": Cell("text", "a"), "image": Cell("image", None, ("a.png",))}
    found = variants_of(row, cells, AugmentationOptions(flip=True))
    assert [(weight, cells["prompt"].literal) for weight, cells in found] == [
        (3, "a"),
        (3, "a"),
        (1, "b"),
        (1, "b"),
    ]
    assert len({str(cells["image"]) for _, cells in found}) == 2
