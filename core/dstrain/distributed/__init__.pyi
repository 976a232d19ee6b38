from dstrain.distributed.peers import (
    ignore_sigterm as ignore_sigterm,
    peer_failed as peer_failed,
    should_report as should_report,
)
from dstrain.distributed.sharding import Sharding as Sharding
from dstrain.distributed.signals import (
    catch_stop_signals as catch_stop_signals,
    interrupt_on_signals as interrupt_on_signals,
    is_interrupt as is_interrupt,
)
from dstrain.distributed.world import (
    ProcessGroup as ProcessGroup,
    distributed_run as distributed_run,
)
