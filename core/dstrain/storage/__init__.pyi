from dstrain.storage.columns import write_columns as write_columns
from dstrain.storage.file_digests import Digests as Digests
from dstrain.storage.file_memory import ManyFiles as ManyFiles
from dstrain.storage.files import (
    check_writable as check_writable,
    read_limited as read_limited,
    replacing as replacing,
    write_file as write_file,
    write_json as write_json,
)
from dstrain.storage.hashing import (
    file_mark as file_mark,
    hash_json as hash_json,
    sha256 as sha256,
)
from dstrain.storage.lazy_sequences import Chosen as Chosen
from dstrain.storage.locks import lock as lock
from dstrain.storage.run_files import (
    BAD_SAMPLES as BAD_SAMPLES,
    RUN as RUN,
    RunFiles as RunFiles,
)
from dstrain.storage.safetensors import (
    CHECKSUM as CHECKSUM,
    read_tensors as read_tensors,
    tensor_shapes as tensor_shapes,
    verify_file as verify_file,
)
from dstrain.storage.temporaries import (
    remove_leftovers as remove_leftovers,
    temporary as temporary,
)
from dstrain.storage.tensor_writer import (
    take_part as take_part,
    write_tensors as write_tensors,
)
