"""Conversions of the values of a run, by the names that the tables use."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain_tools.importing.context import Context, as_list, truth
from dstrain_tools.importing.entries import Result
from dstrain_tools.importing.source import read_data

Conversion = Callable[[str, Any, Context], Result]
"""(our option, the value, where to look things up) -> what becomes of it."""
OPTIMIZERS = MappingProxyType(
    {
        "adamw": "adamw",
        "adamw8bit": "adamw8bit",
        "adamw8": "adamw8bit",
        "pagedadamw8bit": "paged_adamw8bit",
        "lion": "lion",
        "lion8bit": "lion8bit",
        "pagedlion8bit": "paged_lion8bit",
        "ademamix8bit": "ademamix8bit",
        "adafactor": "adafactor",
        "prodigy": "prodigy",
        "prodigyopt.prodigy": "prodigy",
        "came": "came",
        "adamwschedulefree": "schedulefree",
        "schedulefree.adamwschedulefree": "schedulefree",
        "bitsandbytes.optim.adamw8bit": "adamw8bit",
        "bitsandbytes.optim.pagedadamw8bit": "paged_adamw8bit",
    }
)
SCHEDULES = (
    *("constant", "constant_with_warmup", "linear", "cosine", "polynomial"),
    *("cosine_with_restarts", "rex"),
)
SAMPLINGS = MappingProxyType(
    {
        "sigmoid": "logit_normal",
        "uniform": "uniform",
        "linear": "uniform",
        "shift": "shifted",
        "flux_shift": "shifted",
        "qwen_shift": "shifted",
        "weighted": "uniform",
    }
)
"""How timesteps are drawn there -> the name of the same, or the nearest, here."""
OF_SIGMA = MappingProxyType(
    {
        "none": "uniform",
        "uniform": "uniform",
        "logit_normal": "logit_normal",
        "mode": "mode",
    }
)
"""weighting_scheme -> distribution of `timestep_sampling sigma`."""


def as_it_is(option: str, value: Any, context: Context) -> Result:
    """Carry a value over."""
    if value is None or value == "":
        return Result(note="is empty")
    if isinstance(value, bool) and not value:
        return Result(note="is off, as here without the flag")
    if str(value).lower() == "false":
        return Result(note="is off, as here without the flag")
    return Result({option: value})


def switch(option: str, value: Any, context: Context) -> Result:
    """Switch on or off what some families have on by default, and others off."""
    return Result({option: truth(value)})


def optimizer(option: str, value: Any, context: Context) -> Result:
    """Name the optimizer as dstrain does."""
    name = str(value)
    if not name:
        return Result(note="is the default, adamw")
    if name.lower() in OPTIMIZERS:
        return Result({option: OPTIMIZERS[name.lower()]})
    if "." in name:
        return Result({option: name})
    return Result(
        lost=f"{name} has no name here: --optimizer takes the dotted path of its class"
    )


def optimizer_8bit(option: str, value: Any, context: Context) -> Result:
    """Switch on the one of bitsandbytes."""
    return Result({option: "adamw8bit"}) if truth(value) else Result(note="is off")


def optimizer_lion(option: str, value: Any, context: Context) -> Result:
    """Switch on Lion."""
    return Result({option: "lion"}) if truth(value) else Result(note="is off")


def words(option: str, value: Any, context: Context) -> Result:
    """Carry NAME=VALUE words over; the weight decay is an option of its own."""
    found: dict[str, Any] = {}
    rest = []
    for text in as_list(value):
        for word in str(text).split():
            name, equals, amount = word.partition("=")
            if name == "weight_decay" and equals:
                found["weight_decay"] = amount
            else:
                rest.append(word)
    if rest:
        found[option] = rest
    return Result(found) if found else Result(note="is empty")


def argument(option: str, value: Any, context: Context) -> Result:
    """Carry an argument of the optimizer over, by the last part of its key."""
    name = context.key.rpartition(".")[2]
    amount = ",".join(str(one) for one in as_list(value))
    return Result({option: [f"{name}={amount}"]})


def scheduler(option: str, value: Any, context: Context) -> Result:
    """Name the schedule of the learning rate."""
    name = str(value)
    if name not in SCHEDULES:
        return Result(lost=f"{name} is none of --lr_scheduler: {', '.join(SCHEDULES)}")
    return Result({option: name})


def _schedule(context: Context) -> str:
    for key in ("lr_scheduler", "train.lr_scheduler"):
        name = str(context.value(key, ""))
        if name:
            return name
    return "constant"


def warmup(option: str, value: Any, context: Context) -> Result:
    """Count the steps of a warm-up, which may be a share of all."""
    number = float(value)
    if not number:
        return Result(note="is the default")
    if _schedule(context) == "constant":
        return Result(
            note="the schedule is constant, which has no warm-up there either"
        )
    if number >= 1:
        return Result({option: int(number)})
    total = context.value("max_train_steps")
    if total is None or context.value("max_train_epochs") is not None:
        return Result(lost="is a share of all steps; --lr_warmup_steps N counts them")
    steps = max(1, round(number * int(total)))
    return Result({option: steps}, f"{value} of {total} steps")


def cycles(option: str, value: Any, context: Context) -> Result:
    """Count the cosines, where there are several."""
    if _schedule(context) == "cosine_with_restarts":
        return Result({option: value})
    return Result(note="acts with lr_scheduler cosine_with_restarts alone")


def power(option: str, value: Any, context: Context) -> Result:
    """Give the exponent, where there is one."""
    if _schedule(context) == "polynomial":
        return Result({option: value})
    return Result(note="acts with lr_scheduler polynomial alone")


def steps(option: str, value: Any, context: Context) -> Result:
    """Count the steps, unless epochs do."""
    if context.value("max_train_epochs") not in (None, ""):
        return Result(note="max_train_epochs wins over it")
    return as_it_is(option, value, context)


def precision(option: str, value: Any, context: Context) -> Result:
    """Name the dtype that is computed in."""
    name = str(value).lower()
    if name in ("bf16", "bfloat16"):
        return Result({option: "bf16"})
    if name in ("no", "fp32", "float32"):
        return Result({option: "no"})
    return Result({option: "bf16"}, f"{name} is not supported: bf16 has its speed")


def in_bf16(option: str, value: Any, context: Context) -> Result:
    """Train weights in bf16."""
    if not truth(value):
        return Result(note="is off")
    return Result({option: "bf16"}, "updates are rounded up or down by chance")


def blocks(option: str, value: Any, context: Context) -> Result:
    """Count the blocks that wait in RAM; 0 is none."""
    if not int(value):
        return Result(note="is 0: none")
    if not context.trains_lora:
        what = "weights that are trained in full stay on the GPU"
        return Result(
            lost=f"{what}; --optimizer paged_adamw8bit lets its state leave it"
        )
    return Result({option: value})


def cached(option: str, value: Any, context: Context) -> Result:
    """Compute what is not trained once: latents and texts, both in one folder."""
    if not truth(value):
        return Result(note="is off")
    folder = output("output_path", context.output_folder, context).options
    return Result({option: f"{folder['output_path']}-features"})


def mean_squared(option: str, value: Any, context: Context) -> Result:
    """Take the squared error, which is the loss here."""
    if str(value) in ("mse", "l2"):
        return Result(note="is the loss here")
    return Result(lost=f"{value} is not offered: the loss is that of --task")


def tiles(option: str, value: Any, context: Context) -> Result:
    """Give the side of tiles."""
    if not value:
        return Result(note="is the default")
    return Result({option: value, "tiled": True})


def _adapter(context: Context) -> str:
    module = str(context.value("network_module", ""))
    arguments = " ".join(str(one) for one in as_list(context.value("network_args", "")))
    if "lokr" in module or "algo=lokr" in arguments:
        return "lokr"
    if "algo=dora" in arguments or "dora_wd=True" in arguments:
        return "dora"
    is_other = "loha" in module or "algo=" in arguments.replace("algo=lora", "")
    return "other" if is_other else "lora"


def network_module(option: str, value: Any, context: Context) -> Result:
    """Tell the kind of adapter by the module that makes it."""
    kind = _adapter(context)
    if kind == "other":
        return Result(lost=f"{value} is none of --lora_type: lora, dora, lokr")
    if kind == "lora":
        return Result(note="a LoRA is what is trained by default")
    return Result({option: kind})


def of_lora(option: str, value: Any, context: Context) -> Result:
    """Carry a number of a LoRA over, where one is trained."""
    if value is None or not context.trains_lora:
        return Result(note="acts only where a LoRA is trained")
    if option == "lora_dropout" and not float(value):
        return Result(note="is 0: none")
    return Result({option: value})


def network_args(option: str, value: Any, context: Context) -> Result:
    """Carry over what has a counterpart among the arguments of the module."""
    found: dict[str, Any] = {}
    lost = []
    for text in as_list(value):
        for word in str(text).split():
            name, _, amount = word.partition("=")
            if name == "loraplus_lr_ratio":
                found["loraplus_lr_ratio"] = amount
            elif name == "factor" and _adapter(context) == "lokr":
                found.update(factor("lokr_factor", amount, context).options)
            elif name in ("algo", "dora_wd") and _adapter(context) != "other":
                pass  # network_module says it
            else:
                lost.append(name)
    if lost:
        names = ", ".join(lost)
        return Result(
            found, lost=f"{names}: layers are chosen by --lora_target_modules"
        )
    return Result(found, "" if found else "network_module says it")


def network_type(option: str, value: Any, context: Context) -> Result:
    """Name the kind of adapter."""
    name = str(value).lower()
    if name == "lora":
        return Result(note="a LoRA is what is trained by default")
    if name in ("dora", "lokr"):
        return Result({option: name})
    return Result(lost=f"{name} is none of --lora_type: lora, dora, lokr")


def factor(option: str, value: Any, context: Context) -> Result:
    """Give the factor of a LoKr, where -1 is the default."""
    is_lokr = _adapter(context) == "lokr" or context.value("network.type") == "lokr"
    if int(value) < 1 or not is_lokr:
        return Result(note="is the default")
    return Result({option: int(value)})


def timesteps(option: str, value: Any, context: Context) -> Result:
    """Name the distribution of timesteps, or the nearest."""
    name = str(value)
    if name == "sigma":
        scheme = str(context.value("weighting_scheme", "none"))
        found = OF_SIGMA.get(scheme, "uniform")
        shift = float(context.value("discrete_flow_shift", 1) or 1)
        if found == "uniform" and shift != 1:
            return Result({option: "shifted"}, "the shift is the model's own")
        return Result({option: found})
    if name not in SAMPLINGS:
        return Result(
            {option: "shifted"},
            f"{name} has no counterpart; the model's own shift is near",
        )
    found = SAMPLINGS[name]
    if found == "shifted":
        return Result(
            {option: found},
            f"{name} shifts a sigmoid; here the model's own shift is of a uniform draw",
        )
    return Result({option: found})


def timestep_type(option: str, value: Any, context: Context) -> Result:
    """Name the distribution of timesteps of ai-toolkit."""
    if value == "weighted":
        found = {option: "uniform", "loss_weighting": "bsmntw"}
        return Result(found, "the weights are those of --loss_weighting bsmntw")
    return timesteps(option, value, context)


def weighting(option: str, value: Any, context: Context) -> Result:
    """Name the weights of the loss by timestep."""
    if str(value) in ("sigma_sqrt", "cosmap"):
        return Result(
            {option: "none"}, lost=f"{value} is none of --loss_weighting: bsmntw, none"
        )
    return Result({option: "none"})


def trackers(option: str, value: Any, context: Context) -> Result:
    """Name the trackers."""
    return Result({option: "tensorboard,wandb" if value == "all" else value})


def wandb(option: str, value: Any, context: Context) -> Result:
    """Switch on the tracker."""
    return Result({option: "wandb"}) if truth(value) else Result(note="is off")


def project(option: str, value: Any, context: Context) -> Result:
    """Name the project, where there is a tracker with projects."""
    logs = str(context.value("log_with", "")) in ("wandb", "all")
    if logs or context.is_on("logging.use_wandb"):
        return Result({option: value})
    return Result(note="acts with Weights & Biases alone")


def output(option: str, value: Any, context: Context) -> Result:
    """Name the folder of the run: that of all runs, and its name."""
    name = context.value("output_name") or context.value("config.name")
    return Result({option: str(Path(str(value)) / str(name)) if name else str(value)})


def output_name(option: str, value: Any, context: Context) -> Result:
    """Name the folder of the run, where no folder of all runs does."""
    parent = context.value("output_dir") or context.value("training_folder")
    if parent:
        return Result({option: str(Path(str(parent)) / str(value))})
    return Result({option: str(value)})


def save_epochs(option: str, value: Any, context: Context) -> Result:
    """Save after every epoch, which is the default."""
    if not value or int(value) == 1:
        return Result(note="weights are saved after every epoch by default")
    what = "weights are saved after every epoch, or every --save_steps N steps"
    return Result(lost=f"{what}; how many steps {value} epochs are, --dry_run says")


def preview_steps(option: str, value: Any, context: Context) -> Result:
    """Count the steps between previews, where there are any."""
    if context.is_on("train.disable_sampling"):
        return Result(note="previews are switched off")
    prompts_of_run = context.value("sample_prompts") or context.value("sample.prompts")
    if not (prompts_of_run or context.value("sample.samples")):
        return Result(note="there are no prompts to make previews of")
    if not value:
        return Result(note="is off")
    return Result({option: value})


def preview_epochs(option: str, value: Any, context: Context) -> Result:
    """Make previews whenever weights are saved, which is the default."""
    saved = context.value("save_every_n_epochs", 1)
    if str(value) == str(saved) or not context.value("sample_prompts"):
        return Result(note="previews are made whenever weights are saved")
    return Result(
        lost="previews are made whenever weights are saved, or every --preview_steps N steps"
    )


def prompts(option: str, value: Any, context: Context) -> Result:
    """Give the prompts of previews, without what stands behind them."""
    if context.is_on("train.disable_sampling"):
        return Result(note="previews are switched off")
    texts = [
        one.get("prompt") if isinstance(one, dict) else one for one in as_list(value)
    ]
    return _previews(option, [str(text) for text in texts if text])


def prompt_file(option: str, value: Any, context: Context) -> Result:
    """Give the prompts of a file, without what stands behind them."""
    path = Path(str(value))
    places = [path, *(file.parent / path for file in context.source.files)]
    found = [place for place in places if place.is_file()]
    if not found:
        return Result(
            lost=f"{path} is not here; give each prompt with --preview_prompt TEXT"
        )
    if found[0].suffix in (".toml", ".json"):
        return _previews(option, _prompts_of_table(found[0]))
    lines = found[0].read_text("utf-8-sig").splitlines()
    return _previews(option, [one for one in lines if one.strip() and one[:1] != "#"])


def _prompts_of_table(path: Path) -> list[str]:
    if path.suffix == ".json":
        rows = json.loads(path.read_text("utf-8"))
    else:
        data = read_data(path).get("prompt", {})
        rows = data.get("subset", [data]) if isinstance(data, dict) else data
    return [str(row["prompt"]) for row in rows if "prompt" in row]


def _previews(option: str, texts: list[str]) -> Result:
    """Return prompts without flags; these have no counterpart."""
    # The flags of a prompt follow it: `a dog --w 512 --s 20`.
    bare = [re.split(r"\s+--(?=[a-z])", text, maxsplit=1)[0].strip() for text in texts]
    if not any(bare):
        return Result(note="has no prompts")
    note = ""
    if bare != [text.strip() for text in texts]:
        note = "sizes, seeds and images of previews are the variant's defaults"
    return Result({option: [one for one in bare if one]}, note)


def other_file(option: str, value: Any, context: Context) -> Result:
    """Name a file, such as a LoRA, that the run starts from."""
    if not value:
        return Result(note="is empty")
    if not Path(str(value)).is_file():
        return Result(lost=f"{value} is not here; give it with --{option}")
    return Result({option: value})


def of_validation(option: str, value: Any, context: Context) -> Result:
    """Count the steps between validations, where there are any."""
    if float(context.value("validation_split", 0) or 0):
        return Result({option: value})
    return Result(note="there is no validation without validation_split")


def share(option: str, value: Any, context: Context) -> Result:
    """Give the share of the validation; 0 is none."""
    return Result({option: value}) if float(value) else Result(note="is 0: none")


def average(option: str, value: Any, context: Context) -> Result:
    """Give the decay of an average, where one is kept."""
    if context.is_on("train.ema_config.use_ema"):
        return Result({option: value})
    return Result(note="no average is kept without use_ema")


def use_average(option: str, value: Any, context: Context) -> Result:
    """Keep an average, with the decay of ai-toolkit where none is given."""
    if not truth(value):
        return Result(note="is off")
    return Result({option: context.value("train.ema_config.ema_decay", 0.999)})


def same_name(option: str, value: Any, context: Context) -> Result:
    """Carry a flag over that is the same here."""
    if isinstance(value, list):
        return Result({option: value})
    return as_it_is(option, value, context)
