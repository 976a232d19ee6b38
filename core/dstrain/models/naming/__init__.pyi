from dstrain.models.naming.family import (
    family_of as family_of,
    pipeline_class as pipeline_class,
)
from dstrain.models.naming.folders import weight_sets as weight_sets
from dstrain.models.naming.location import (
    FLAG as FLAG,
    PublishedModel as PublishedModel,
    absolute as absolute,
    located as located,
)
from dstrain.models.naming.model_files import (
    model_configs as model_configs,
    named_files as named_files,
    parts_of as parts_of,
    refuse_unsupported as refuse_unsupported,
    without_replaced as without_replaced,
)
