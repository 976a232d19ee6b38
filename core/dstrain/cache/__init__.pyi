from dstrain.cache.addresses import ABSENT as ABSENT, as_text as as_text
from dstrain.cache.commands.contents import (
    Contents as Contents,
    PlanContents as PlanContents,
    open_contents as open_contents,
    write_part as write_part,
)
from dstrain.cache.commands.prune import named_plan as named_plan
from dstrain.cache.commands.verify import (
    shard_problem as shard_problem,
    verified as verified,
)
from dstrain.cache.in_use import readers as readers
from dstrain.cache.plan_files import (
    PlanSamples as PlanSamples,
    commit_plans as commit_plans,
    open_samples as open_samples,
    plan_name as plan_name,
    stored_plans as stored_plans,
)
from dstrain.cache.plan_records import CacheInfo as CacheInfo
from dstrain.cache.source_files import SourceFiles as SourceFiles
from dstrain.cache.store import (
    DIGESTS as DIGESTS,
    MARKER as MARKER,
    FeatureCache as FeatureCache,
    ShardWriter as ShardWriter,
    check_is_cache as check_is_cache,
)
from dstrain.storage.files import replacing as replacing
from dstrain.storage.locks import lock as lock
from dstrain.storage.temporaries import temporary as temporary
