"""Forms of datasets: one more is a module here, and a line of `forms`."""

from dstrain.plugin import Form

from dstrain_datasets.forms.columnar import Arrow, Parquet
from dstrain_datasets.forms.published import Published
from dstrain_datasets.forms.urls import Urls
from dstrain_datasets.options import DatasetsOptions


def forms(options: DatasetsOptions) -> list[Form]:
    """Return the forms."""
    return [Parquet(), Arrow(), Published(), Urls(options.url_folder)]
