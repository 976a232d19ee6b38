"""Find the blocks that a network repeats: the parts by which its memory is counted,
offloaded, sharded and compiled.
"""

from collections.abc import Mapping

from torch import nn


def repeated_blocks(network: nn.Module) -> Mapping[str, nn.Module]:
    """Return the blocks that a network repeats, by name, in the order of their
    definition, which is the one in which they are called; none inside another.

    A network of diffusers names their classes in `_repeated_blocks`. In others they are
    the modules of each `nn.ModuleList` with two or more modules, all of one class.
    """
    classes = getattr(network, "_repeated_blocks", None) or ()
    found: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if classes:
            if type(module).__name__ in classes:
                found[name] = module
        elif isinstance(module, nn.ModuleList) and _are_equal(module):
            found |= {f"{name}.{key}": one for key, one in module.named_children()}
    return {name: module for name, module in found.items() if _has_weights(module)}


def _are_equal(modules: nn.ModuleList) -> bool:
    return len(modules) > 1 and len({type(module) for module in modules}) == 1


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
