from dstrain.cli.click_options import (
    FilePath as FilePath,
    command as command,
    file_path as file_path,
    shared_options as shared_options,
)
from dstrain.cli.completion import completing as completing, families as families
from dstrain.cli.errors import explain as explain
from dstrain.cli.family_command import FamilyCommand as FamilyCommand
from dstrain.cli.help import Command as Command, Group as Group
