"""Say how a command keeps the weights of components, with their bytes."""

from contextlib import suppress

from dstrain.config import as_size
from dstrain.errors import DstrainError
from dstrain.graph import Plan
from dstrain.graph.keepers import BEFORE_LORA
from dstrain.models import Config, components_of, empty_component, find
from dstrain.models.placing import set_dtype
from dstrain.pipeline.denoiser_check import entries_that_differ
from dstrain.pipeline.planned_weights import planned_component
from dstrain.runs.setup import Setup


def described_with_bytes(setup: Setup, plan: Plan) -> dict[str, str]:
    """Return how components are kept in words, with the bytes that their weights take,
    those that are as they are loaded left out.

    A component of which no configuration is given is measured as it is first published.
    Raises UsageError for layers that the given one does not have.
    """
    found = setup.keepers.described(plan.components[""])
    for name, words in found.items():
        published, config = _config_of(setup, name)
        component = components_of(setup.family)[name]
        network = None if config is None else empty_component(component, config)
        if network is None:
            continue
        if not published:
            setup.keepers.check({name: network}, setup.device, BEFORE_LORA)
        set_dtype(network, setup.dtype)
        size = planned_component(name, network.requires_grad_(False), has_lora=False)
        place = setup.keepers.bytes(name, size.tensors)
        places = {"on the device": place.device, "in RAM": place.ram}
        said = [f"{as_size(one)} {where}" for where, one in places.items() if one]
        words += f": {', '.join(said)}, loaded as {size.dtype}"
        found[name] = words + published
    return found


def _config_of(setup: Setup, name: str) -> tuple[str, Config | None]:
    """Return the configuration that the given model files tell of a component; else, that
    of the first published model that it may be of, after the words that say so.
    """
    spec, family = setup.spec, setup.family
    if setup.models:
        with suppress(DstrainError):
            found = find(family, setup.models, [name], (), spec.components, [])
            if name in found.configs:
                return "", found.configs[name]
    experts = spec.experts
    denoisers = experts.components if experts else (family.default_trainable,)
    wanted = spec.denoiser_config if name in denoisers else {}
    for model, config in components_of(family)[name].published.items():
        if not entries_that_differ(wanted, config):
            return f", if it is as in {model}", config
    return "", None
