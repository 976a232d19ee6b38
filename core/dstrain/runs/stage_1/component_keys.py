"""Find what the values of stage 1 depend on beside the inputs: components and code."""

from dstrain.data.forms import Source
from dstrain.models import Found, component_digests
from dstrain.runs.setup import Setup
from dstrain.storage import Digests, hash_json
from dstrain.storage.hashing import package_digest


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


def code_of_rows(setup: Setup, source: Source | None) -> str:
    """Return a digest of what decides which rows and inputs there are: all the code of
    dstrain, of the family's package and of those of the forms that read the dataset, and
    the rows that plugins add.
    """
    family = setup.family.components.partition(":")[0]
    sources = () if source is None else (source, *source.parts)
    forms = {type(one.reader).__module__ for one in sources if one.reader is not None}
    code = [package_digest(name) for name in ("dstrain", family, *sorted(forms))]
    code += [str((row.text, row.prompt, row.arguments)) for row in setup.prompt_rows]
    return hash_json("code of rows", code)
