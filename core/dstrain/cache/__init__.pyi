from dstrain.cache.addresses import (
    ABSENT as ABSENT,
    ADDRESS as ADDRESS,
    Addresses as Addresses,
    as_text as as_text,
    find as find,
    packed as packed,
    prefixes as prefixes,
)
from dstrain.cache.in_use import exclusive as exclusive, readers as readers
from dstrain.cache.plan_files import (
    PlanSamples as PlanSamples,
    commit_plans as commit_plans,
    open_samples as open_samples,
    plan_name as plan_name,
    prompt_addresses as prompt_addresses,
    read_record as read_record,
    stored_plans as stored_plans,
)
from dstrain.cache.shards import read_shard as read_shard
from dstrain.cache.source_files import SourceFiles as SourceFiles
from dstrain.cache.store import (
    DIGESTS as DIGESTS,
    MARKER as MARKER,
    FeatureCache as FeatureCache,
    ShardWriter as ShardWriter,
    check_is_cache as check_is_cache,
)
