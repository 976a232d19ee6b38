from dstrain.models.component_files import (
    ModelConfig as ModelConfig,
    assign as assign,
    component_at as component_at,
)
from dstrain.models.components import Files as Files, components_of as components_of
from dstrain.models.device import (
    DTYPES as DTYPES,
    default_device as default_device,
    precision as precision,
)
from dstrain.models.execution import StoredLinear as StoredLinear
from dstrain.models.formats import (
    NATIVE as NATIVE,
    Config as Config,
    Shapes as Shapes,
    to_checkpoint as to_checkpoint,
)
from dstrain.models.hub.clients import chosen_hub as chosen_hub
from dstrain.models.hub.fetching import fetch as fetch
from dstrain.models.hub.model_source import ModelSource as ModelSource
from dstrain.models.naming.folders import weight_sets as weight_sets
from dstrain.models.naming.location import (
    located as located,
    pipeline_class as pipeline_class,
)
from dstrain.models.needed_components import Found as Found, find as find
from dstrain.models.network_files import empty_component as empty_component
from dstrain.models.toy import write_toy as write_toy
from dstrain.models.weights import recognize as recognize
from dstrain.storage.safetensors import opened as opened
