"""Say how components are kept, in words and in bytes, from their configurations alone."""

from contextlib import suppress

from dstrain.config import as_size
from dstrain.errors import DstrainError, MissingFiles
from dstrain.graph import Plan
from dstrain.graph.keepers import KeptBytes
from dstrain.models import Config, components_of, empty_component, find
from dstrain.models.networks import set_dtype
from dstrain.pipeline.variant_choice import entries_that_differ
from dstrain.runs.dry_run.components import planned_component
from dstrain.runs.setup import Setup


def described_with_bytes(setup: Setup, plan: Plan) -> dict[str, str]:
    """Return how components are kept in words, with the bytes that their weights take,
    those that are as they are loaded left out.

    A component of which no configuration is given is measured as it is first published.
    Raises UsageError for layers that the given one does not have.
    """
    found = setup.keepers.described(plan.components[""])
    for name, words in found.items():
        component = components_of(setup.family)[name]
        config = _given_config(setup, name)
        model = ""
        if config is None:
            model, config = _first_published(setup, name)
        network = None if config is None else empty_component(component, config)
        if network is None:
            continue
        if not model:
            for keeper in setup.keepers.of(name):
                if keeper.kind == "quantize":
                    keeper.check({name: network}, setup.device)
        set_dtype(network, setup.dtype)
        size = planned_component(name, network.requires_grad_(False), has_lora=False)
        place = setup.keepers.bytes(name, size.tensors)
        found[name] = f"{words}: {_in_words(place)}"
        found[name] += f", loaded as {size.dtype}"
        if model:
            found[name] += f", if it is as in {model}"
    return found


def _in_words(place: KeptBytes) -> str:
    if place.used:
        return f"{as_size(place.ram)} in RAM"
    if place.ram:
        return f"{as_size(place.device)} on the device, {as_size(place.ram)} in RAM"
    return as_size(place.device)


def _given_config(setup: Setup, name: str) -> Config | None:
    """Return the configuration that the given model files tell of a component."""
    absent: list[MissingFiles] = []
    if setup.models:
        with suppress(DstrainError):
            found = find(
                setup.family, setup.models, [name], (), setup.spec.components, absent
            )
            return found.configs.get(name)
    return None


def _first_published(setup: Setup, name: str) -> tuple[str, Config | None]:
    """Return the first published model that a component of the variant may be of, and its
    configuration there.
    """
    spec = setup.spec
    denoisers = (
        spec.experts.components if spec.experts else (setup.family.default_trainable,)
    )
    wanted = spec.denoiser_config if name in denoisers else {}
    for model, config in components_of(setup.family)[name].published.items():
        if not entries_that_differ(wanted, config):
            return model, config
    return "", None
