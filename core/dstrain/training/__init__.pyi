from dstrain.training.batching import (
    SKIPPED as SKIPPED,
    MicroBatch as MicroBatch,
    Order as Order,
    Position as Position,
    RepeatedRows as RepeatedRows,
    split_across_ranks as split_across_ranks,
)
from dstrain.training.ema import (
    MovingAverage as MovingAverage,
    in_eval_mode as in_eval_mode,
)
from dstrain.training.held_out import (
    hold_out as hold_out,
    with_skipped_rows as with_skipped_rows,
)
from dstrain.training.loader import load_batches as load_batches
from dstrain.training.losses import OWN_TASKS as OWN_TASKS, SFT as SFT
from dstrain.training.memory import (
    LESS_MEMORY as LESS_MEMORY,
    collect_memory as collect_memory,
    is_out_of_memory as is_out_of_memory,
    oom_as_error as oom_as_error,
    peak_memory as peak_memory,
)
from dstrain.training.module import TrainingModule as TrainingModule
from dstrain.training.sample_sources import (
    CachedSamples as CachedSamples,
    DecodedSamples as DecodedSamples,
    Sample as Sample,
    SampleSource as SampleSource,
)
