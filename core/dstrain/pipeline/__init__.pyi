from dstrain.pipeline.arguments import (
    check_measured as check_measured,
    checked as checked,
)
from dstrain.pipeline.inference_plan import (
    generate_task as generate_task,
    plan_inference as plan_inference,
)
from dstrain.pipeline.keeping import (
    keeper_request as keeper_request,
    keepers_for_inference as keepers_for_inference,
    with_presets as with_presets,
)
from dstrain.pipeline.loss_masks import MASK as MASK
from dstrain.pipeline.masked_spec import (
    Masks as Masks,
    check_masks as check_masks,
    with_masks as with_masks,
    with_masks_of_dataset as with_masks_of_dataset,
)
from dstrain.pipeline.pipeline import Pipeline as Pipeline
from dstrain.pipeline.preset_choice import find_preset as find_preset
from dstrain.pipeline.sampler import (
    SamplerOptions as SamplerOptions,
    inference_sigmas as inference_sigmas,
    integrate as integrate,
    seeded_noise as seeded_noise,
)
from dstrain.pipeline.start_image import start_input as start_input
from dstrain.pipeline.variant_choice import (
    choose_variant as choose_variant,
    score_columns as score_columns,
    with_overrides as with_overrides,
)
