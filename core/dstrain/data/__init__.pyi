from dstrain.data.cells import (
    Cell as Cell,
    input_key as input_key,
    load_cell as load_cell,
    read_literal as read_literal,
)
from dstrain.data.dataset import Dataset as Dataset, inputs_of as inputs_of
from dstrain.data.images import (
    Resolution as Resolution,
    fit as fit,
    load_image as load_image,
    read_size as read_size,
)
from dstrain.data.row_checks import DataConfig as DataConfig
from dstrain.data.table import Fault as Fault, Table as Table, text_fault as text_fault
from dstrain.data.tables.listing import (
    CAPTIONS as CAPTIONS,
    VIDEOS as VIDEOS,
    Medium as Medium,
    left_out as left_out,
    list_media as list_media,
    printable as printable,
    read_caption as read_caption,
)
from dstrain.data.tables.metadata import metadata_files as metadata_files
from dstrain.data.variants import CaptionOptions as CaptionOptions
from dstrain.data.videos import probe as probe, read_frames as read_frames
