from dstrain.registry.discovery import (
    checked_family as checked_family,
    load_family as load_family,
    refuse_unknown as refuse_unknown,
    usable_families as usable_families,
    variant_of as variant_of,
)
from dstrain.registry.extensions import Extensions as Extensions, warn_once as warn_once
from dstrain.registry.family import (
    ModelFamily as ModelFamily,
    Option as Option,
    write_plugin as write_plugin,
)
from dstrain.registry.hooks import (
    Defaults as Defaults,
    PromptRow as PromptRow,
    Section as Section,
)
from dstrain.registry.loaded_extensions import (
    disabled_plugins as disabled_plugins,
    disabling as disabling,
    extensions_in_use as extensions_in_use,
    load_extensions as load_extensions,
    registered as registered,
)
