"""Convert a LoRA file, or the weights of a component, to the key names of another program.

No model files are opened: the network's shapes follow from its configuration, which is
in the header of every file that dstrain writes, or from the published configuration
that fits.
"""

import json
from collections import Counter, UserDict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from dstrain.plugin import (
    Component,
    Files,
    ModelFamily,
    Shapes,
    UsageError,
    first_few,
    get_logger,
    nearest,
    shell_word,
)
from dstrain.plugin.lora import (
    ADAPTER_HEADER,
    CHECKSUM,
    FOLDED,
    NATIVE,
    Alpha,
    Lora,
    LoraFile,
    StateError,
    base_shapes,
    components_of,
    empty_component,
    from_checkpoint,
    in_header,
    is_folded,
    load_family,
    number_of,
    pair_of,
    parse_keys,
    parse_lora,
    peft_exceptions,
    read_lora,
    read_tensors,
    recognize,
    recorded_config,
    rescaled,
    to_checkpoint,
    write_tensors,
)
from torch import Tensor

from dstrain_formats.key_names import format_of_weights, key_format_of
from dstrain_formats.programs import layers_in
from dstrain_formats.reading import in_peft_names, is_key_of_lora_file

logger = get_logger("dstrain.export")


def export(
    source: Path,
    output: Path,
    program: str | None,
    family_name: str | None = None,
    overwrite: bool = False,
    disabled_plugins: Collection[str] = (),
    alpha: Alpha | None = None,
    component: str = "",
) -> str:
    """Write a file with the names of `program`, whole or not at all, and return a
    summary of it.

    Raises UsageError if `output` exists and may not be replaced, or if the program has
    no such files; StateError for a file that no naming explains; SystemFault.

    Args:
        source: The file to convert; of a LoRA, `parse_lora` says what may stand after
            it.
        output: The file to write.
        program: The program as `dstrain export --format` names it; None keeps the names
            of a LoRA file, to which `alpha` is added.
        family_name: The family, needed only if the header of `source` names none.
        overwrite: Whether to replace `output`.
        disabled_plugins: Plugins to ignore.
        alpha: Alpha of a LoRA file that does not state it.
        component: The component of a LoRA file that does not state it.
    """
    file = LoraFile(source, component=component, alpha=alpha)
    if not source.exists():
        file = _with_flags(file)
        source, alpha = file.path, file.alpha
        if not source.exists():
            raise StateError(source, "does not exist")
    if source.is_dir():
        inside = first_few(
            shell_word(str(path)) for path in sorted(source.glob("*.safetensors"))
        )
        what = "is a folder; give a file" + (f" in it: {inside}" if inside else "")
        raise UsageError("INPUT", f"{source} {what}")
    tensors, header = read_tensors(source)
    header.pop(CHECKSUM, None)
    if (output.exists() or output.is_symlink()) and not overwrite:
        what = f"{output} already exists and was not modified"
        raise UsageError("OUTPUT", what, "give --overwrite to replace it")
    if program is None:
        if alpha is None or component or file.skip_missing:
            raise UsageError("--format", "is required: program whose key names to use")
        if ADAPTER_HEADER in header or is_folded(header):
            what = f"has no effect: {source} states its own alpha"
            raise UsageError("--alpha", what)
        converted = _with_alpha(source, tensors, alpha)
        header = {"format": "pt", **header, **FOLDED}
        if alpha != "rank":
            header["alpha"] = str(alpha)
        _write(output, converted, header)
        layers = number_of(len(converted) - len(tensors), "layer")
        return f"{layers}, now with alpha"
    name = family_name or header.get("family")
    if name is None:
        what = f"is required: the header of {source} names no family"
        raise UsageError("--model", what)
    family = load_family(name, disabled_plugins)
    header = {"format": "pt", "family": name, **header}
    is_lora = any(map(is_key_of_lora_file, tensors))
    for flag, value in (("--alpha", alpha), ("--component", component)):
        if value and not is_lora:
            raise UsageError(flag, f"has no effect: {source} is not a LoRA file")
    if is_lora:
        _check_component(file, family)
        converted, summary = _convert_lora(file, header, family, program)
    else:
        config = recorded_config(header)
        converted, summary = _convert_weights(source, tensors, family, program, config)
    _write(output, converted, header)
    return (
        f"{summary}, {number_of(len(converted), 'key')}; the first is {min(converted)}"
    )


def _write(output: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(output, tensors, header, checksum=True)


def _with_alpha(
    source: Path, tensors: Mapping[str, Tensor], alpha: Alpha
) -> dict[str, Tensor]:
    """Return the tensors of a LoRA file with an alpha for each layer that equals its
    rank, and the one given as part of `up`; names are unchanged.

    It needs no network: every program's names of a layer may end in `.alpha`.
    """
    found = dict(tensors)
    if any(".lokr_" in key or ".hada_" in key for key in tensors):
        what = "is for pairs of matrices; LoKr or LoHa without alpha is given one by --format"
        raise UsageError("--alpha", what, "export --format diffusers --alpha rank")
    for name, layer in parse_keys(source, in_peft_names(source, tensors)).items():
        if layer.alpha is not None:
            what = f"has no effect: {source} states its own alpha"
            raise UsageError("--alpha", what)
        down, up = pair_of(layer.parts)
        rank = float(len(down))
        found[f"{name}.alpha"] = torch.tensor(rank)
        if alpha == "rank":
            continue
        (key,) = [key for key, tensor in tensors.items() if tensor is up]
        found[key] = rescaled(up, alpha, rank)
    return found


def _convert_lora(
    file: LoraFile, header: dict[str, str], family: ModelFamily, program: str
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file of `program` and a summary; adapts the header, which
    keeps the alpha of the training.
    """
    source = file.path
    if file.component:
        header["component"] = file.component
    loras, networks = _read(file, header, family)
    tensors: dict[str, Tensor] = {}
    fields: dict[str, Any] = {}
    for lora in loras:
        lora.refuse_merged(source, "export cannot write")
        if len(lora.by_type) > 1:
            what = f"contains layers of {' and '.join(lora.by_type)}; export writes one type"
            raise StateError(source, what)
        key_format = key_format_of(source, lora.component, family, program)
        try:
            tensors |= layers_in(lora, key_format, networks[lora.component])
        except UsageError as error:
            raise UsageError("--format", error.what, *error.help_lines) from error
        fields |= adapter_fields(lora, key_format.prefixes[0])
    header.pop(ADAPTER_HEADER, None)
    if program == "diffusers" and fields:
        header[ADAPTER_HEADER] = json.dumps(fields, sort_keys=True)
    if not is_folded(header):
        header |= FOLDED
        header.pop("alpha", None)
        alphas = {
            name: layer.alpha for lora in loras for name, layer in lora.layers.items()
        }
        usual, _ = Counter(alphas.values()).most_common(1)[0]
        if len(loras) == 1 or set(alphas.values()) == {usual}:
            for name, value in in_header("alpha", alphas, usual).items():
                header[name] = json.dumps(value)
    unused = [
        lora.component
        for lora in loras
        if not key_format_of(source, lora.component, family, program).is_loaded
    ]
    if unused:
        names = " or ".join(unused)
        logger.warning(
            f"{program}: its pipelines load no LoRA on {names}, without an error"
        )
    summary = ", ".join(
        f"{number_of(len(lora.layers), 'layer')} of {lora.component}" for lora in loras
    )
    if "timesteps" in header:
        summary += f", the expert of timesteps {header['timesteps']}"
    return tensors, f"LoRA on {summary}, in {program}'s names"


def _with_flags(file: LoraFile) -> LoraFile:
    """Return a file with what its name says about it, beside the flags; raises
    UsageError for what both say, and for a scale.
    """
    named = parse_lora(str(file.path))
    if named.scale != 1:
        what = f"has no scale, but {file.path} has {named.scale:g}"
        raise UsageError("INPUT", what, "export writes a LoRA with its own strength")
    if file.alpha is not None and named.alpha is not None:
        raise UsageError("--alpha", f"is given twice: {file.path}")
    alpha = named.alpha if file.alpha is None else file.alpha
    return replace(named, component=file.component, alpha=alpha)


def _check_component(file: LoraFile, family: ModelFamily) -> None:
    """Raise UsageError for a file whose component is none of the family."""
    known = list(family.lora_prefixes)
    if file.component and file.component not in known:
        hint = nearest(file.component, known)
        what = f"{family.name} has no LoRA on {file.component!r}{hint}"
        raise UsageError("--component", what, f"components: {', '.join(known)}")


class LazyShapes(UserDict[str, Any]):
    """The shapes of networks by component, made from functions when first used."""

    def __getitem__(self, name: str) -> Shapes:
        """Return the shapes of one network."""
        shapes: Shapes = self.data[name]()
        return shapes


def _read(
    file: LoraFile, header: Mapping[str, str], family: ModelFamily
) -> tuple[list[Lora], Mapping[str, Shapes]]:
    """Read a LoRA with the first published configurations that it fits; the header's,
    if there is one, replaces that of its component.
    """
    if file.skip_missing:
        # One that lacks nothing may come later than one that lacks some layers.
        try:
            return _read(replace(file, skip_missing=False), header, family)
        except StateError:
            pass
    source = file.path
    components = _distinct(family, header.get("component", ""))
    own = recorded_config(header)
    names = dict.fromkeys(name for one in components for name in one.published)
    what = f"no configuration of {family.name} is known, in its header or published"
    first_error = StateError(source, what)
    for attempt, name in enumerate(names or [""]):
        networks = LazyShapes()
        for component in components:
            config = component.published.get(name)
            if own is not None and component.name == header.get("component"):
                config = own
            if config is not None:
                shapes = cache(partial(_shapes, component, config))
                networks.data[component.name] = shapes
        if not networks:
            continue
        try:
            return read_lora(file, family, networks), networks
        except StateError as error:
            if not attempt:
                first_error = error
    raise first_error


def _distinct(family: ModelFamily, named: str) -> list[Component]:
    """Return the components that can have LoRA; of several with the same keys, the one
    that the header names, else the first.
    """
    chosen: list[Component] = []
    for name in sorted(family.lora_prefixes, key=lambda name: name != named):
        component = components_of(family)[name]
        if not any(component.same_keys_as(other) for other in chosen):
            chosen.append(component)
    return chosen


def _shapes(component: Component, config: Mapping[str, Any]) -> Shapes:
    network = empty_component(component, config)
    if network is None:
        what = f"the shapes of {component.name} are unknown: a plain function loads it"
        advice = "give its network a method build(configuration)"
        raise UsageError(f"component {component.name}", what, advice)
    return base_shapes(network)


def adapter_fields(lora: Lora, prefix: str) -> dict[str, Any]:
    """Return the fields of `lora_adapter_metadata`, where diffusers finds rank and
    alpha; in files that dstrain writes they are equal. There are none of other
    types than LoRA and DoRA, for which they are read off the shapes.
    """
    if lora.type not in ("lora", "dora"):
        return {}
    ranks = {name: layer.rank for name, layer in lora.layers.items()}
    rank = max(ranks.values())
    others = peft_exceptions(ranks, rank)
    targets = sorted(lora.layers)
    if "targets" in lora.header:
        targets = lora.header["targets"].split(",")
    fields = {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": targets,
        "rank_pattern": others,
        "alpha_pattern": others,
        "use_dora": {} if lora.type == "lora" else True,
    }
    return {prefix + name: value for name, value in fields.items() if value != {}}


def _convert_weights(
    source: Path,
    tensors: Mapping[str, Tensor],
    family: ModelFamily,
    program: str,
    config: Mapping[str, Any] | None,
) -> tuple[dict[str, Tensor], str]:
    """Convert the weights of one component, which are recognized by their own names;
    returns them and a summary.
    """
    if program == "kohya":
        what = "kohya is a format for LoRA files; for the weights of a component use diffusers, comfyui or diffsynth"
        raise UsageError("--format", what)
    found = recognize(Files((source,)), list(components_of(family).values()))
    if len(found) > 1:
        what = f"contains {len(found)} components; export takes one"
        raise StateError(source, what)
    alike, files = found[0]
    component = alike[0]
    inside = {
        key.removeprefix(files.prefix): value
        for key, value in tensors.items()
        if key.startswith(files.prefix)
    }
    state = from_checkpoint(files.checkpoint_format, inside)
    wanted = key_format_of(source, component.name, family, program).checkpoint_format
    if config is not None:
        wanted = format_of_weights(component, family, program, config) or wanted
    converted = state if wanted is NATIVE else to_checkpoint(wanted, state)
    names = f"in {program}'s names"
    if wanted is NATIVE and program != "diffusers":
        names = f"in diffusers' names: none are known that only {program} has"
    return converted, f"{len(state)} weights of {component.name}, {names}"
