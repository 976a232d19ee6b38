"""An updater: the optimizer is given the sign of each gradient."""

from dstrain.plugin import TrainConfig, Updater, hookimpl

api = 2


class Signs(Updater):
    """Lets the optimizer step by signs, after the gradients were clipped."""

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.sign_()
        super().step()


@hookimpl
def dstrain_updater(options: TrainConfig) -> Updater:
    return Signs()
