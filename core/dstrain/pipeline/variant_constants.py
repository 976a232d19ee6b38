"""Apply flags to the constants of a variant."""

from dataclasses import replace
from typing import Any

from dstrain.config.options import ModelChoice
from dstrain.data import read_literal
from dstrain.errors import UsageError
from dstrain.graph import PipelineSpec, as_column
from dstrain.registry import ModelFamily

STEPS = "num_inference_steps"
TOY_STEPS = 4
"""Most denoising steps of a toy by default: its images are noise after any number."""


def with_overrides(
    spec: PipelineSpec, family: ModelFamily, config: ModelChoice
) -> PipelineSpec:
    """Return the pipeline spec with the constants that flags, or --toy, give, and with
    few denoising steps by default for a toy.

    Raises UsageError for text that is not a valid value, and for the flag of a constant
    that the variant does not have.
    """
    flags = config.family_options
    for option in family.options:
        if option.name not in flags:
            continue
        acts = option.component or option.saves or option.name in spec.constants
        variants = option.variants or family.variants
        if not acts or spec.variant not in variants:
            what = f"has no effect: variant {spec.variant} does not use it"
            raise UsageError(f"--{option.name}", what)
    changed: dict[str, Any] = {}
    for name, constant in spec.constants.items():
        if flags.get(name) is not None:
            try:
                cell = read_literal(flags[name], as_column(name, constant))
            except ValueError as error:
                raise UsageError(f"--{name}", str(error)) from error
            if cell is None:
                raise UsageError(f"--{name}", "is blank")
            changed[name] = replace(constant, value=cell.literal)
        elif config.toy and constant.toy is not None:
            changed[name] = replace(constant, value=constant.toy)
    defaults = dict(spec.defaults)
    if config.toy and STEPS in defaults:
        defaults[STEPS] = min(defaults[STEPS], TOY_STEPS)
    return replace(spec, inputs={**spec.inputs, **changed}, defaults=defaults)
