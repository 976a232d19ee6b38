"""The forms that this package adds to `dstrain`."""

from collections.abc import Sequence

from dstrain.plugin import Form, TrainConfig, hookimpl

api = 2


@hookimpl
def dstrain_forms(options: TrainConfig) -> Sequence[Form]:
    """Return the forms."""
    from dstrain_datasets.forms import forms
    from dstrain_datasets.options import DatasetsOptions

    return forms(options.of(DatasetsOptions))
