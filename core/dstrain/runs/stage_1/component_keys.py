"""Find what the values of stage 1 depend on beside the inputs: components and code."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from dstrain.models import Found, component_digests
from dstrain.runs.setup import Setup
from dstrain.storage import Digests, hash_json


def component_keys(setup: Setup, found: Found, digests: Digests) -> dict[str, str]:
    """Return component -> digest of its files, its configuration and the family's code
    for it.
    """
    components = component_digests(found, digests)
    for name in found.files:
        code = dict(setup.component_code(name))
        components[name] = hash_json("component", [components[name], code])
    experts = setup.spec.experts
    if experts is not None:
        # Units ask for the configuration by the name of the denoiser.
        for role, own in experts.roles.items():
            for one in own:
                if f"{one}_config" in components:
                    digest = components[f"{one}_config"]
                    components.setdefault(f"{role}_config", digest)
    return components


def code_of_rows(setup: Setup) -> str:
    """Return a digest of the code that decides which rows and inputs there are: all of
    dstrain and of the family's package.
    """
    family = setup.family.components.partition(":")[0].partition(".")[0]
    return hash_json("code of rows", [_sources(name) for name in ("dstrain", family)])


def _sources(package: str) -> str:
    spec = find_spec(package) if package else None
    # A family may be a single module.
    places = spec and (spec.submodule_search_locations or [str(spec.origin)])
    digest = hashlib.blake2b()
    for place in map(Path, places or ()):
        for path in sorted(place.rglob("*.py")) or [place]:
            digest.update(path.relative_to(place).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
