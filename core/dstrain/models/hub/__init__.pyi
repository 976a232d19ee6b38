from dstrain.models.hub.record import (
    RECORD as RECORD,
    SHARD as SHARD,
    Record as Record,
    described_shards as described_shards,
    local_files as local_files,
    missing_shards as missing_shards,
    select as select,
)
from dstrain.models.hub.source import (
    FLAG as FLAG,
    ID as ID,
    ModelSource as ModelSource,
    chosen_hub as chosen_hub,
    fetch as fetch,
    fetch_dataset as fetch_dataset,
    find_paths as find_paths,
    hub_of_environment as hub_of_environment,
    may_be_id as may_be_id,
    model_base as model_base,
)
