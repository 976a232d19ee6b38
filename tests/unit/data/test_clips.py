"""Frames are chosen by their times and cut into clips of a length that a model can use."""

import pytest
from dstrain import UsageError
from dstrain.config.options import SamplingMode
from dstrain.data.clips import FrameSampling, frames_at_rate

RATES = (8, 15, 16, 24, 25, 30, 50, 60)


def starts(count: int, fps: float) -> list[float]:
    return [number / fps for number in range(count)]


@pytest.mark.parametrize("stride", [0, 1, 4, 8])
@pytest.mark.parametrize("mode", ["head", "chunk", "uniform"])
def test_every_length_gives_equal_clips_of_a_length_the_model_can_use(
    mode: SamplingMode, stride: int
) -> None:
    for wanted in (1, 1 + 2 * stride, 1 + 8 * stride):
        for total in range(1, 120):
            clips = FrameSampling(wanted, mode, samples=3).clips(total, stride)
            (length,) = {len(clip) for clip in clips}
            assert 1 <= length <= min(wanted, total)
            assert not stride or length % stride == 1 % stride
            assert length + max(stride, 1) > min(wanted, total)  # the most that fits
            for clip in clips:
                assert clip.step == 1
                assert 0 <= clip.start < clip.stop <= total
            assert len(set(clips)) == len(clips)


@pytest.mark.parametrize(
    ("numbers", "wrong", "near"),
    [
        *(((frames,), str(frames), "81") for frames in (80, 82)),
        *(((84,), "84", "85"), ((2,), "2", "1"), ((4,), "4", "5")),
        ((16, 33, 50), "16", "17"),
    ],
)
def test_numbers_of_frames_the_model_cannot_use_are_refused_with_the_nearest(
    numbers: tuple[int, ...], wrong: str, near: str
) -> None:
    *shorter, frames = numbers
    sampling = FrameSampling(frames, shorter=tuple(shorter))
    with pytest.raises(UsageError) as caught:
        sampling.check(4)
    assert caught.value.where == "--num_frames"
    assert caught.value.what.startswith(f"{wrong} ")
    assert caught.value.what.endswith(f" {near}")
    sampling.check(0)
    FrameSampling(int(near)).check(4)


@pytest.mark.parametrize("fps", RATES)
def test_a_video_at_the_models_rate_stays_as_it_is(fps: int) -> None:
    for count in (1, 2, 3, 50, 81):
        exact = starts(count, fps)
        rough = [round(start, 3) for start in exact]
        for times, end in (
            (exact, count / fps),
            (rough, round(count / fps, 3)),
            (rough, rough[-1] + round(1 / fps, 3)),
        ):
            assert frames_at_rate(times, end, fps) == tuple(range(count))


@pytest.mark.parametrize("source", RATES)
def test_each_frame_chosen_is_the_nearest_to_its_time_and_as_many_as_the_time_there_is(
    source: int,
) -> None:
    for fps in RATES:
        # So many to a second, times are whole numbers.
        unit = fps * source
        for count in (1, 2, 7, 40, 61):
            chosen = frames_at_rate(starts(count, source), count / source, fps)
            assert len(chosen) == max(1, (2 * count * fps + source) // (2 * source))
            for number, frame in enumerate(chosen):
                moment = number * source
                nearest = min(abs(moment - other * fps) for other in range(count))
                assert abs(moment - frame * fps) <= nearest + unit / 1000
