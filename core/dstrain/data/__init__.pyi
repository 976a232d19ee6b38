from dstrain.data.cells import (
    Cell as Cell,
    file_names as file_names,
    input_key as input_key,
    load_cell as load_cell,
    read_literal as read_literal,
)
from dstrain.data.clips import FrameSampling as FrameSampling
from dstrain.data.dataset import Dataset as Dataset, inputs_of as inputs_of
from dstrain.data.files import spellings as spellings
from dstrain.data.images import (
    Resolution as Resolution,
    convert as convert,
    cover as cover,
    fit as fit,
    load_image as load_image,
    read_size as read_size,
    white_pixels as white_pixels,
)
from dstrain.data.output import (
    save_image_or_video as save_image_or_video,
    write_video as write_video,
)
from dstrain.data.row_checks import DataConfig as DataConfig, check_rows as check_rows
from dstrain.data.table import Fault as Fault, Table as Table
from dstrain.data.variants import CaptionOptions as CaptionOptions
from dstrain.data.videos import probe as probe, read_frames as read_frames
