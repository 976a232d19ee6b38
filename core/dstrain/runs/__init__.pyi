from dstrain.runs.build import prepare as prepare
from dstrain.runs.cache_commands.contents import (
    Contents as Contents,
    PlanContents as PlanContents,
    open_contents as open_contents,
    write_part as write_part,
)
from dstrain.runs.cache_commands.listing import as_lines as as_lines, listing as listing
from dstrain.runs.cache_commands.prune import named_plan as named_plan, prune as prune
from dstrain.runs.cache_commands.shown import ShownPlan as ShownPlan
from dstrain.runs.cache_commands.verify import (
    Verified as Verified,
    repair as repair,
    shard_problem as shard_problem,
    verified as verified,
    verify as verify,
)
from dstrain.runs.checkpoints.directory import refuse_early as refuse_early
from dstrain.runs.runner import plan_of as plan_of, start as start
from dstrain.runs.script.parts import OwnParts as OwnParts
from dstrain.runs.setup import Setup as Setup
from dstrain.runs.stage_1.precompute import data_process as data_process
from dstrain.runs.start_training import train as train
from dstrain.runs.training_data import (
    TrainingData as TrainingData,
    open_training_data as open_training_data,
)
