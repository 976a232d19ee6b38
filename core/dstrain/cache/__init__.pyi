from dstrain.cache.addresses import as_text as as_text
from dstrain.cache.backend.index import (
    EXPORTED as EXPORTED,
    MARKER as MARKER,
    PART as PART,
    check_is_cache as check_is_cache,
    is_cache as is_cache,
    make_folders as make_folders,
    parts_in as parts_in,
)
from dstrain.cache.backend.plan_files import (
    PlanSamples as PlanSamples,
    StoredPlan as StoredPlan,
    commit_plans as commit_plans,
    plan_name as plan_name,
    stored_plans as stored_plans,
)
from dstrain.cache.commands.contents import (
    Contents as Contents,
    PlanContents as PlanContents,
    open_contents as open_contents,
    write_part as write_part,
)
from dstrain.cache.commands.prune import named_plan as named_plan
from dstrain.cache.commands.verify import verified as verified
from dstrain.cache.plan_records import CacheInfo as CacheInfo
from dstrain.cache.store import FeatureCache as FeatureCache, ShardWriter as ShardWriter
from dstrain.storage.files import replacing as replacing
from dstrain.storage.locks import lock as lock
from dstrain.storage.temporaries import temporary as temporary
