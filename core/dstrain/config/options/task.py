"""The task of a run."""

from dstrain.config.conversion import options
from dstrain.config.fields import option


@options
class TaskChoice:
    """What a run does: a task, or one of its two stages alone."""

    task: str = option(
        "training",
        "Training task, with --feature_cache in two stages. TASK:data_process and TASK:train run one of them alone.",
        "sft",
        affects={"recipe"},
    )

    @property
    def task_name(self) -> str:
        """Return the task without its stage."""
        return self.task.partition(":")[0]

    @property
    def stage(self) -> str:
        """Return 'data_process', 'train', or '' for a command that names no stage: it
        runs both one after the other if it has a feature cache, else a run that is not
        split.
        """
        return self.task.partition(":")[2]
