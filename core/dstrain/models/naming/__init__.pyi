from dstrain.models.naming.location import family_of as family_of
from dstrain.models.naming.model_files import (
    model_configs as model_configs,
    named_files as named_files,
    parts_of as parts_of,
    refuse_unsupported as refuse_unsupported,
    without_replaced as without_replaced,
)
