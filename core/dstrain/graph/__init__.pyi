from dstrain.graph.code_digest import code_of as code_of
from dstrain.graph.frozen import freeze as freeze
from dstrain.graph.function_spec import (
    NEGATIVE as NEGATIVE,
    POSITIVE as POSITIVE,
    FunctionSpec as FunctionSpec,
)
from dstrain.graph.inputs import (
    Column as Column,
    Constant as Constant,
    Input as Input,
    MaskColumn as MaskColumn,
    Measured as Measured,
    as_column as as_column,
    with_measured as with_measured,
)
from dstrain.graph.long_prompts import (
    LongPrompt as LongPrompt,
    noticing_long_prompts as noticing_long_prompts,
)
from dstrain.graph.noise_process import ConstrainLatents as ConstrainLatents
from dstrain.graph.plan import Plan as Plan, Step as Step
from dstrain.graph.planning import make_plan as make_plan
from dstrain.graph.render import as_text as as_text
from dstrain.graph.spec import PipelineSpec as PipelineSpec
from dstrain.graph.unit import Task as Task
from dstrain.graph.values import (
    Frames as Frames,
    deserialize as deserialize,
    serialize as serialize,
)
