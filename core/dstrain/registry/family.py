"""The torch-free record by which a plugin offers a family (entry-point group
`dstrain.models`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from dstrain.errors import DstrainError, UsageError

if TYPE_CHECKING:
    from dstrain.graph.spec import PipelineSpec

API = 1
"""Number of the plugin interface; a record made for another number is shown as broken.
"""


@dataclass(frozen=True)
class Option:
    """A flag of the family's own: `--<name>`.

    component alone: the flag's value is the path of that component. component and
    field: the bare flag sets that entry of the component's configuration to true.
    saves: the bare flag names that program, in whose names the LoRA of the family's
    default trainable is saved. None of these: it changes the `Setting` of its name.
    variants: those in which it acts; () for all.
    """

    name: str
    help: str
    component: str = ""
    field: str = ""
    variants: tuple[str, ...] = ()
    saves: str = ""

    @property
    def is_flag(self) -> bool:
        """Return whether it stands alone, with no value after it."""
        return bool(self.field or self.saves)


@dataclass(frozen=True)
class ModelFamily:
    """A family: names and numbers only, so that listing it imports no torch.

    pipelines: "package.module:PIPELINES", variant -> PipelineSpec. components:
    "package.module:COMPONENTS", a tuple of Component. toy: "package.module:function",
    function(folder, variant, seed) writes a toy model as published. variants: the first
    is the toy's default. model_ids: variant -> patterns of the model ids that mean it.
    variants_for: "package.module:function", function(content of the denoiser's
    configuration) -> variants it can be. lora_targets: component -> target patterns.
    lora_aliases: other name of a target -> patterns. lora_prefixes: component -> prefix
    of its keys in a LoRA file. default_ids: component -> "model id:pattern" used when
    nothing else says where a tokenizer is.
    """

    name: str
    pipelines: str
    components: str
    toy: str
    variants: tuple[str, ...]
    default_trainable: str
    lora_targets: Mapping[str, tuple[str, ...]]
    lora_prefixes: Mapping[str, str]
    lora_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    model_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variants_for: str = ""
    default_ids: Mapping[str, str] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    api: int = API

    def spec(self, variant: str) -> "PipelineSpec":
        """Import the pipeline spec of a variant, and with it torch; raise UsageError if
        there is none.
        """
        specs = self.load("pipelines")
        if not isinstance(specs, Mapping) or variant not in specs:
            what = f"its pipelines, {self.pipelines}, have no {variant!r}"
            want = "want a dict of PipelineSpec by variant"
            raise UsageError(f"plugin {self.name}", f"{what}; {want}")
        spec: PipelineSpec = specs[variant]
        return replace(spec, family=self.name, variant=variant)

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
                    yield f"its field {name} holds something else than {part.__name__}"
        if not self.variants:
            yield f"the record of {self.name!r} has no variant"

    def missing_targets(self) -> Iterator[str]:
        """Yield what the record names and cannot be found; only the packages above a
        module are imported.
        """
        for part in ("pipelines", "components", "toy", "variants_for"):
            target = getattr(self, part)
            module, _, name = target.partition(":")
            if target and not (name and _is_there(module)):
                yield f"its {part}, {target!r}, is not there; want package.module:name of what is"


def _is_there(module: str) -> bool:
    """Return whether a module can be found; only the packages above it are imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False
