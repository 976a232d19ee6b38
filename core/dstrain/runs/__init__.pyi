from dstrain.runs.build import (
    open_training_data as open_training_data,
    prepare as prepare,
)
from dstrain.runs.cache_commands.contact_sheet import Wanted as Wanted, show as show
from dstrain.runs.cache_commands.exporting import export as export
from dstrain.runs.cache_commands.importing import import_cache as import_cache
from dstrain.runs.cache_commands.listing import as_lines as as_lines, listing as listing
from dstrain.runs.cache_commands.prune import prune as prune
from dstrain.runs.cache_commands.repair import repair as repair
from dstrain.runs.cache_commands.verify import verify as verify
from dstrain.runs.checkpoints.directory import refuse_early as refuse_early
from dstrain.runs.loop import train as train
from dstrain.runs.runner import plan_of as plan_of, start as start
from dstrain.runs.script.parts import OwnParts as OwnParts
from dstrain.runs.setup import Setup as Setup
from dstrain.runs.stage_1.precompute import data_process as data_process
from dstrain.runs.training_run import TrainingData as TrainingData
