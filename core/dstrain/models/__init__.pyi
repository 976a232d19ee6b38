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
    from_checkpoint as from_checkpoint,
    to_checkpoint as to_checkpoint,
)
from dstrain.models.functional import (
    check_sides as check_sides,
    override_positional_args as override_positional_args,
    pack as pack,
    unpack as unpack,
)
from dstrain.models.needed_components import (
    Found as Found,
    component_digests as component_digests,
    find as find,
)
from dstrain.models.network_files import empty_component as empty_component
from dstrain.models.toy import write_toy as write_toy
from dstrain.models.weights import recognize as recognize
