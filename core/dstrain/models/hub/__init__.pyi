from dstrain.models.hub.clients import (
    chosen_hub as chosen_hub,
    hub_of_environment as hub_of_environment,
    model_base as model_base,
)
from dstrain.models.hub.fetching import (
    fetch as fetch,
    fetch_dataset as fetch_dataset,
    find_paths as find_paths,
)
from dstrain.models.hub.model_source import (
    FLAG as FLAG,
    ID as ID,
    ModelSource as ModelSource,
    may_be_id as may_be_id,
)
from dstrain.models.hub.record import (
    RECORD as RECORD,
    SHARD as SHARD,
    described_shards as described_shards,
    missing_shards as missing_shards,
)
