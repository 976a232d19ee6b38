"""The options of every command that opens a model."""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from dstrain.config.conversion import convert, converted, options
from dstrain.config.converters import as_file_list, as_text
from dstrain.config.fields import option, own_flags
from dstrain.config.plugin_options import plugin_flags

Precision = Literal["no", "bf16"]
Hub = Literal["modelscope", "huggingface"]
T = TypeVar("T")


@options
class ModelChoice:
    """The options of every command that opens a model."""

    model: str = field(
        default="",
        metadata={
            "required": True,
            "group": "model",
            "help": "Model family, unless --model_id tells it (`dstrain models` lists the installed ones).",
            "affects": {"training"},
            "common": True,
        },
    )
    variant: str | None = option(
        "model",
        "Variant of the family. Defaults to the one that fits the model files and inputs (the first, for a toy).",
        affects={"resolved"},
        common=True,
    )
    model_id: str | None = converted(
        "model",
        "The model in one word: a published id, ID or ID@REVISION (`dstrain models` lists those that are known), "
        "a folder, or a file. Files that the next two flags name replace its own of the same component.",
        converter=as_text,
        default=None,
        common=True,
    )
    model_paths: str | None = converted(
        "model",
        "Local model files: a JSON list of paths, or of lists of paths for sharded files.",
        converter=as_file_list,
        default=None,
    )
    model_id_with_origin_paths: str | None = option(
        "model",
        "Published model files to download, comma-separated: ID:PATTERN or ID@REVISION:PATTERN, ...",
    )
    toy: bool = option(
        "model",
        "Use a tiny model with random weights instead of model files.",
        False,
        common=True,
    )
    hub: Hub | None = option(
        "model",
        "Hub to download missing model files from. Defaults to that of the variable DSTRAIN_DOWNLOAD_SOURCE, "
        "else to modelscope.",
    )
    mixed_precision: Precision | None = option(
        "memory",
        "Compute dtype. Defaults to bf16 on a GPU and no (fp32) on a CPU.",
        affects={"resolved"},
    )
    seed: int = option(
        "general",
        "Random seed.",
        0,
        affects={"training"},
        minimum=0,
        maximum=2**63 - 1,
        common=True,
    )
    height: int | None = option(
        "data: sizes",
        "Height of images and videos in pixels; requires --width.",
        affects={"training", "cache", "dataset"},
        minimum=1,
        common=True,
    )
    width: int | None = option(
        "data: sizes",
        "Width of images and videos in pixels; requires --height.",
        affects={"training", "cache", "dataset"},
        minimum=1,
        common=True,
    )
    dry_run: bool = option(
        "general",
        "Check the command, print what it would do, and exit.",
        False,
        affects={"start"},
        common=True,
    )
    family_options: Mapping[str, str] = field(default_factory=dict)
    """Values of the family's own options."""
    typed: frozenset[str] = field(default=frozenset(), compare=False)
    """The options that are on the command line, also those with their default."""
    disabled_plugins: tuple[str, ...] = ()
    """Disabled plugins, by name or distribution (`-p no:NAME`)."""
    plugin_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of plugins' options, by name, where they are not the default."""
    command: ClassVar[str] = ""
    """The command whose options of plugins it has."""

    def __post_init__(self) -> None:
        convert(self)

    if not TYPE_CHECKING:  # for it, `of` has the types

        def __getattr__(self, name: str) -> Any:
            """Return the value of a plugin's option."""
            known = {} if name.startswith("_") else plugin_flags(type(self))
            if name not in known:
                what = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(what)
            return self.plugin_options.get(name, known[name].default)

    def of(self, record: type[T]) -> T:
        """Return a plugin's record of options with the values of this configuration."""
        names = {flag.name for flag in own_flags(record)}
        values = self.plugin_options.items()
        return record(**{name: value for name, value in values if name in names})
