"""The forms that this package adds to `dstrain`."""

from collections.abc import Sequence

from dstrain.plugin import Form, TrainConfig, hookimpl

api = 2


@hookimpl
def dstrain_forms(options: TrainConfig) -> Sequence[Form]:
    """Return the forms."""
    from dstrain_datasets.columnar import Arrow, Parquet
    from dstrain_datasets.options import DatasetsOptions
    from dstrain_datasets.published import Published
    from dstrain_datasets.urls import Urls

    return [
        Parquet(),
        Arrow(),
        Published(),
        Urls(options.of(DatasetsOptions).url_folder),
    ]
