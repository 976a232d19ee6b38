"""Define the torch-free record by which a plugin provides a family (entry-point group
`dstrain.models`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from dstrain.errors import DstrainError, UsageError
from dstrain.graph import freeze

if TYPE_CHECKING:
    from dstrain.graph import PipelineSpec
import keyword
import re
from pathlib import Path

from dstrain.installed import installed

COMMAND = "dstrain plugins new"


def write_plugin(
    name: str, folder: Path, disabled_plugins: Collection[str] = ()
) -> None:
    """Write the package of a family to a new folder; raises UsageError for a name that
    no package can have, or an installed family has, and for a folder that exists.
    """
    words = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"
    if not re.fullmatch(words, name) or keyword.iskeyword(name):
        want = "expected lower-case letters, digits and single underscores, such as my_model"
        raise UsageError(COMMAND, f"{name!r} is not a valid family name; {want}")
    for plugin in installed(disabled_plugins):
        if plugin.name == name:
            what = f"a family named {name!r} is installed, by {plugin.where}"
            raise UsageError(COMMAND, what)
    if folder.exists():
        raise UsageError(
            COMMAND, f"{folder} already exists; existing files were not modified"
        )
    template = Path(__file__).with_name("template")
    for source in template.rglob("*"):
        place = source.relative_to(template)
        if source.is_dir() or "__pycache__" in place.parts:
            continue
        path = folder / _renamed(str(place), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_renamed(source.read_text("utf-8"), name), encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    distribution = name.replace("_", "-")
    return text.replace("my_model", name).replace("my-model", distribution)


@dataclass(frozen=True)
class Option:
    """An option of a family's own, `--NAME`; without `component`, `field`, `saves` and
    `idle` it changes the variant's constant of its name.
    """

    name: str
    help: str
    component: str = ""
    """The component whose path is the value; with `field`, the one it configures."""
    field: str = ""
    """Entry of the component's configuration that the bare flag sets to true."""
    variants: tuple[str, ...] = ()
    """The variants in which it acts; () for all."""
    saves: str = ""
    """The program in whose key names the bare flag saves LoRA."""
    idle: str = ""
    """Why the bare flag of another program changes nothing here, which is said."""

    @property
    def is_flag(self) -> bool:
        """Return whether it stands alone, with no value after it."""
        return bool(self.field or self.saves or self.idle)


@dataclass(frozen=True)
class ModelFamily:
    """A family: names and numbers only, so that listing it imports no torch."""

    name: str
    pipelines: str
    """Place of the specs, "package.module:PIPELINES": a dict by variant."""
    components: str
    """Place of the components, "package.module:COMPONENTS": a tuple of Component."""
    toy: str
    """Place of function(folder, variant, seed), which writes a toy model."""
    variants: tuple[str, ...]
    """The first one is the default of a toy."""
    default_trainable: str
    """The component that gets LoRA if no option says what is trained."""
    lora_targets: Mapping[str, tuple[str, ...]]
    """Component -> patterns of the layers that get LoRA."""
    lora_prefixes: Mapping[str, str]
    """Component -> prefix of its keys in a LoRA file."""
    lora_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Another name of a target -> patterns."""
    model_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Variant -> patterns of the model ids of its published models. Of the variants that one
    id means, columns and inputs decide; without them it is the first.
    """
    model_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Model id -> component -> its files in what `--model_id` means by this id: a pattern of
    the model's own files, or "model id:pattern" of another one's. Tokenizers and processors
    are not named here: they are found beside these files, or by `default_ids`.
    """
    pipeline_classes: tuple[str, ...] = ()
    """What model_index.json of the published models has as `_class_name`."""
    other_models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a published denoiser that no variant is for -> entries of its config.json
    that tell it, as in `PipelineSpec.denoiser_config`.
    """
    unsupported_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a published model that no variant is for -> patterns, any of which tells it:
    of model ids ("owner/name"), of files ("owner/name:files") or of inputs that only it
    has.
    """
    default_ids: Mapping[str, str] = field(default_factory=dict)
    """Component -> "model id:pattern" of a tokenizer that nothing else locates."""
    options: tuple[Option, ...] = ()
    gradient_checkpointing: bool = False
    """Whether training recomputes activations unless --no_use_gradient_checkpointing is given:
    for models whose activations no card holds."""
    recipes: str = ""
    """Place of its recipes, "package:folder": a folder with goals.toml and cards.toml."""
    needs: tuple[str, ...] = ()
    """Plugins that it does not work without, beside core, such as "datasets"."""
    api: int = 1
    """The version of the plugin interface that the record is made for, written as a number:
    a record that states none was made for the first.
    """

    def __post_init__(self) -> None:
        freeze(self)

    def variants_of(self, model_id: str) -> list[str]:
        """Return the variants that a model id means, by `model_ids`."""
        return [
            variant
            for variant, patterns in self.model_ids.items()
            if any(fnmatchcase(model_id, pattern) for pattern in patterns)
        ]

    def knows(self, model_id: str) -> bool:
        """Return whether a model id is one of the family's, if only as one that is not
        supported.
        """
        return (
            model_id in self.model_files
            or bool(self.variants_of(model_id))
            or bool(self.unsupported([model_id]))
        )

    def unsupported(self, given: Iterable[str]) -> str:
        """Return the name of the model that no variant is for and that one of these model
        ids, files ("id:pattern") or inputs tells; '' for none.
        """
        given = list(given)
        for model, patterns in self.unsupported_models.items():
            if any(fnmatchcase(one, pattern) for one in given for pattern in patterns):
                return model
        return ""

    @property
    def known_models(self) -> dict[str, str]:
        """Return the model ids that the record knows, and patterns of further ones, each with
        its variant, or '' where the id does not tell it.
        """
        known = {one: ", ".join(self.variants_of(one)) for one in self.model_files}
        for variant, patterns in self.model_ids.items():
            for pattern in patterns:
                if not any(fnmatchcase(one, pattern) for one in self.model_files):
                    known[pattern] = variant
        return known

    def spec(self, variant: str) -> "PipelineSpec":
        """Import the pipeline spec of a variant, and with it torch; raise UsageError if
        there is none.
        """
        specs = self.load("pipelines")
        if not isinstance(specs, Mapping) or variant not in specs:
            what = f"its pipelines, {self.pipelines}, have no variant {variant!r}"
            want = "expected a dict of PipelineSpec by variant"
            raise UsageError(f"plugin {self.name}", f"{what}; {want}")
        spec: PipelineSpec = specs[variant]
        return spec.named(self.name, variant)

    def load(self, part: str) -> Any:
        """Import what a field such as `pipelines` names, and with it torch; raise
        UsageError if that fails.
        """
        place = getattr(self, part)
        module, _, name = place.partition(":")
        try:
            return getattr(import_module(module), name)
        except DstrainError:
            raise
        except (Exception, SystemExit) as error:
            reason = f"its {part}, {place}, cannot be imported: {type(error).__name__}: {error}"
            raise UsageError(f"plugin {self.name}", reason) from error

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the fields, without importing what they name."""
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            kind = get_origin(hint) or hint
            if not isinstance(value, kind):
                yield f"its field {name} is a {type(value).__name__}, not a {kind.__name__}"
            elif kind is tuple:
                part = get_args(hint)[0]
                if not all(isinstance(one, part) for one in value):
                    yield f"its field {name} contains something other than {part.__name__}"
        if not self.variants:
            yield f"the record of {self.name!r} has no variant"

    def missing_targets(self) -> Iterator[str]:
        """Yield what the record names and cannot be found; only the packages above a
        module are imported.
        """
        for part in ("pipelines", "components", "toy"):
            target = getattr(self, part)
            module, _, name = target.partition(":")
            try:
                found = find_spec(module)
            except (ImportError, ValueError, AttributeError):
                found = None
            if target and not (name and found):
                yield f"its {part}, {target!r}, does not exist; expected package.module:name"
