from dstrain.cli.click_options import (
    file_path as file_path,
    shared_options as shared_options,
)
from dstrain.cli.completion import completing as completing
from dstrain.cli.errors import explain as explain
from dstrain.cli.family_command import FamilyCommand as FamilyCommand
from dstrain.cli.help import Command as Command, Group as Group
from dstrain.config import (
    as_size as as_size,
    command_line as command_line,
    flags_by_name as flags_by_name,
    headings as headings,
    parse_origins as parse_origins,
    validate as validate,
)
from dstrain.config.options import Hub as Hub, Precision as Precision
from dstrain.config.serialize import assignment as assignment
from dstrain.console import (
    PAGE_WIDTH as PAGE_WIDTH,
    as_table as as_table,
    fitted as fitted,
    number_of as number_of,
    printable as printable,
    secrets as secrets,
    shell_command as shell_command,
    silenced as silenced,
    status as status,
)
from dstrain.distributed import interrupt_on_signals as interrupt_on_signals
from dstrain.errors import secret_error as secret_error
from dstrain.installed import how_to_have as how_to_have, installed as installed
from dstrain.lazy import without_optional as without_optional
from dstrain.registry import (
    load_extensions as load_extensions,
    load_family as load_family,
    usable_families as usable_families,
)
