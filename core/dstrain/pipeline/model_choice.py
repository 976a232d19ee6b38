"""Find the family and the files of the model that a script names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from dstrain.config.conversion import as_keywords
from dstrain.config.options import Hub, ModelChoice
from dstrain.errors import DstrainError, UsageError, nearest
from dstrain.installed import installed
from dstrain.models import ModelConfig, components_of
from dstrain.models.hub import chosen_hub
from dstrain.models.naming import (
    family_of,
    parts_of,
    refuse_unsupported,
    without_replaced,
)
from dstrain.registry import ModelFamily, load_family, usable_families

Choice = TypeVar("Choice", bound=ModelChoice)
WHERE = "from_pretrained()"
EXAMPLE = 'name a model: from_pretrained("OWNER/NAME"), or a folder or a file'
NAME_FAMILY = "name the family instead, with its files as model_configs,"
"""How a script names the family, which it does by `model` itself."""


@contextmanager
def naming_keywords(config: type[ModelChoice]) -> Iterator[None]:
    """Note how a script writes the flags of a class of options in an error of the block."""
    try:
        yield
    except DstrainError as error:
        if keywords := as_keywords(str(error), config):
            error.add_note(f"in a script: {', '.join(keywords)}")
        raise


def choose_model(
    model: str,
    given: Sequence[ModelConfig],
    folders: Mapping[str, ModelConfig | None],
    hub: Hub | None,
) -> tuple[ModelFamily, tuple[ModelConfig, ...]]:
    """Return the family of a model and its files.

    Raises UsageError and StateError for what names no model, or leaves doubts.

    Args:
        model: A model in one word, as `--model_id` takes it, of which `given` replaces
            files; or a family, whose files are `given`. '' leaves the family to the files.
        given: Files.
        folders: Component -> files that are those of this component.
        hub: The hub to fetch missing files of the model from; None is the default.
    """
    is_family = any(plugin.name == model for plugin in installed())
    family = load_family(model) if is_family else _family_of(model, given)
    if is_family and not given:
        what = f"{model!r} is a family, and no files of a model are given"
        raise UsageError(WHERE, what, f"{EXAMPLE}; or give model_configs")
    own = (replace(one, component=name) for name, one in folders.items() if one)
    named = (*given, *own)
    _refuse_unknown(named, family)
    if is_family or not model:
        return family, named
    refuse_unsupported(family, "--model_id", [model.partition("@")[0]])
    parts = parts_of(model, family, chosen_hub(hub))
    return family, (*without_replaced(parts, named, family), *named)


def with_family(config: Choice) -> Choice:
    """Return a configuration with the family that its model_id tells, where it names none;
    raises what `family_of` raises.
    """
    if config.model or config.model_id is None:
        return config
    if not isinstance(config.model_id, str):
        raise UsageError("--model_id", f"expected text, got {config.model_id!r}")
    found = family_of(config.model_id, config.disabled_plugins)
    assert found is not None  # only where help asks
    return replace(config, model=found.name)


def _family_of(model: str, given: Sequence[ModelConfig]) -> ModelFamily:
    """Return the family of a model; of files, that of the first that tells one."""
    if model:
        named = model
    elif given:
        families, _ = usable_families()
        ids = [one.model_id for one in given if one.model_id]
        known = [one for one in ids if any(family.knows(one) for family in families)]
        paths = [one.path for one in given if one.path]
        first = paths[0] if paths else ""
        named = (known or ids or [first if isinstance(first, str) else first[0]])[0]
    else:
        raise UsageError(WHERE, "no model is given", EXAMPLE)
    found = family_of(named, advice=NAME_FAMILY)
    assert found is not None  # only where help asks
    return found


def _refuse_unknown(given: Sequence[ModelConfig], family: ModelFamily) -> None:
    """Raise UsageError for files of a component that the family does not have."""
    known = components_of(family)
    for one in given:
        if one.component and one.component not in known:
            what = f"model_configs: {family.name} has no component {one.component!r}{nearest(one.component, known)}"
            raise UsageError(WHERE, what, f"components: {', '.join(known)}")
