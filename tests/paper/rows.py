"""The rows whose plans are golden: a wiring on paper, the inputs its data set gives, a
task and what is trained.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.graph.inputs import Column, Given
from dstrain.graph.plan import Plan, make_plan
from dstrain.graph.render import as_text
from dstrain.graph.spec import Wiring
from dstrain.graph.task import Task
from dstrain.training.losses import SFT
from torch import Tensor

from . import flux, qwen_image, wan

PLANS = Path(__file__).parent / "plans"
WIRINGS: tuple[Wiring, ...] = (*qwen_image.WIRINGS, *flux.WIRINGS, *wan.WIRINGS)


def guided_distill(
    predict: Any,
    input_latents: Tensor,
    num_inference_steps: int,
    seed: list[int],
    cfg_scale: list[float],
    *,
    sampler: Any,
) -> Tensor: ...


def denoise(predict: Any, *, sampler: Any) -> Tensor: ...


GUIDED_DISTILL = Task.of(
    "guided_distill",
    guided_distill,
    ("positive", "negative"),
    {
        "num_inference_steps": Column("num_inference_steps", "integer", alike=True),
        "seed": Column("seed", "integer"),
        "cfg_scale": Column("cfg_scale", "number"),
    },
)
GENERATE = Task.of("generate", denoise, ("positive", "negative"))

NEGATIVE = frozenset({"negative_prompt"})
"""The input whose column an ordinary data set does not have."""


@dataclass(frozen=True)
class Row:
    """One golden plan; `without` and `extra` change the inputs that an ordinary data
    set of the variant gives.
    """

    family: str
    variant: str
    trains: tuple[str, ...] = ("dit",)
    task: Task = SFT
    without: frozenset[str] = frozenset()
    extra: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The file's name: family, variant and trainables; then what is unusual about
        the row.
        """
        parts = [self.family, self.variant, "+".join(self.trains) or "nothing"]
        parts += [self.task.name] if self.task is not SFT else []
        parts += [f"without_{name}" for name in sorted(self.without)]
        return "-".join(parts)

    @property
    def wiring(self) -> Wiring:
        """The variant's wiring."""
        return next(
            w for w in WIRINGS if (w.family, w.variant) == (self.family, self.variant)
        )

    @property
    def inputs(self) -> frozenset[str]:
        """The inputs that the data set gives."""
        table = self.wiring.joined(self.task).inputs
        given = {
            name for name, source in table.items() if not isinstance(source, Given)
        }
        return frozenset((given - NEGATIVE - self.without) | self.extra)

    def plan(self) -> Plan:
        """The row's plan."""
        return make_plan(self.wiring, self.inputs, self.task, self.trains)

    def text(self) -> str:
        """The plan as the golden file has it."""
        return as_text(self.plan(), self.wiring, self.task)


def rows(family: str, variants: str, *trains: str) -> list[Row]:
    """Rows for each variant and each of `trains` ('a+b' trains both)."""
    return [
        Row(family, variant, tuple(names.split("+")))
        for variant in variants.split()
        for names in trains
    ]


ROWS: tuple[Row, ...] = (
    *rows("qwen_image", "layered layered-control in-context-control", "dit"),
    *rows(
        "qwen_image",
        "blockwise-controlnet blockwise-controlnet-inpaint",
        "dit",
        "blockwise_controlnet",
    ),
    *rows("qwen_image", "eligen", "dit", "text_encoder"),
    Row("qwen_image", "eligen", ("dit",), GUIDED_DISTILL, extra=NEGATIVE),
    Row("qwen_image", "inpaint", (), GENERATE, extra=NEGATIVE | {"inpaint_mask"}),
    *rows("flux", "fill eligen", "dit"),
    *rows(
        "flux",
        "controlnet-union controlnet-upscaler controlnet-inpaint",
        "dit",
        "controlnet",
    ),
    *rows("flux", "controlnet-union", "dit+controlnet"),
    *rows("flux", "ip-adapter", "dit", "ipadapter"),
    *rows("flux", "redux", "dit", "redux"),
    *rows("wan", "flf2v-2.1 fun-inp fun-control fun-control-camera", "dit"),
    *rows("wan", "vace", "dit", "vace"),
    *rows("wan", "speedcontrol", "dit", "motion_controller"),
    Row("wan", "fun-control", ("dit",), without=frozenset({"reference_image"})),
    Row(
        "wan",
        "vace",
        ("vace",),
        without=frozenset({"vace_reference_image", "vace_video_mask"}),
    ),
)
