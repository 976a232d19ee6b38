from dstrain.training.optimizers.from_options import (
    OptimizerChoice as OptimizerChoice,
    choose_optimizer as choose_optimizer,
)
from dstrain.training.optimizers.rate_groups import (
    build_optimizer as build_optimizer,
    check_names as check_names,
    effective_rate as effective_rate,
    parameter_groups as parameter_groups,
)
from dstrain.training.optimizers.schedules import (
    build_lr_scheduler as build_lr_scheduler,
)
from dstrain.training.optimizers.trial import SIDE as SIDE
