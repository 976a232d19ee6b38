from dstrain.models.hub import FLAG as FLAG
from dstrain.models.naming.folders import weight_sets as weight_sets
from dstrain.models.naming.location import (
    PublishedModel as PublishedModel,
    family_of as family_of,
    located as located,
    pipeline_class as pipeline_class,
)
from dstrain.models.naming.model_files import (
    model_configs as model_configs,
    named_files as named_files,
    parts_of as parts_of,
    refuse_unsupported as refuse_unsupported,
    without_replaced as without_replaced,
)
