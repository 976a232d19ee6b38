from dstrain.runs.build import prepare as prepare
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
