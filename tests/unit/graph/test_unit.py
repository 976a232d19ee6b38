"""A unit's signature is its declaration, and it returns what it declares."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypedDict

import pytest
import torch
from dstrain import Frames, UsageError
from dstrain.graph import FunctionSpec, code_of
from dstrain.graph.unit import component_of
from dstrain.plugin import Unit
from PIL.Image import Image
from torch import Tensor


class Prompt(TypedDict):
    emb: Tensor
    mask: Tensor | None


class Number(TypedDict):
    result: int


class Record(TypedDict):
    latents: Tensor
    mode: int


class Kinds(TypedDict):
    tensor: Tensor
    text: str
    count: int
    scale: float
    flag: bool
    nothing: None
    image: Image
    frames: Frames
    maybe: Image | None
    several: list[Tensor]
    records: list[Record]


class Unstorable(TypedDict):
    thing: dict[str, Any]


def encode(
    prompt: str, image: Image | None = None, *, text_encoder: Any, tokenizer: Any
) -> Prompt:
    return {"emb": torch.ones(1), "mask": None}


def test_inputs_components_and_outputs_are_the_signature() -> None:
    unit = Unit(encode, version=3)
    assert (unit.name, unit.version) == ("encode", 3)
    assert dict(unit.inputs) == {"prompt": True, "image": False}
    assert unit.required == ("prompt",)
    assert unit.components == ("text_encoder", "tokenizer")
    assert dict(unit.outputs) == {"emb": "tensor", "mask": "tensor | none"}


def test_every_storable_kind_is_named() -> None:
    def unit() -> Kinds: ...

    assert dict(Unit(unit).outputs) == {
        "tensor": "tensor",
        "text": "str",
        "count": "int",
        "scale": "float",
        "flag": "bool",
        "nothing": "none",
        "image": "image",
        "frames": "video",
        "maybe": "image | none",
        "several": "list[tensor]",
        "records": "list[{latents: tensor, mode: int}]",
    }


def star(*values: int) -> Prompt: ...
def stars(**values: int) -> Prompt: ...
def positional(value: int, /) -> Prompt: ...
def unstorable(value: int) -> Unstorable: ...
def untyped(value: int): ...  # noqa: ANN201  # what is tested is that it says nothing of what it returns
def plain_dict(value: int) -> dict[str, Tensor]: ...


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (star, "values"),
        (stars, "values"),
        (positional, "value"),
        (unstorable, "thing"),
        (untyped, "TypedDict"),
        (plain_dict, "TypedDict"),
    ],
)
def test_incomplete_declaration_is_refused_naming_function_and_fault(
    function: Callable[..., Any], fault: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Unit(function)
    assert function.__name__ in str(caught.value)
    assert fault in str(caught.value)


def test_given_parameters_are_no_inputs() -> None:
    def predict(
        noisy_latents: Tensor, timestep: Tensor, emb: Tensor, *, dit: Any
    ) -> Tensor: ...

    spec = FunctionSpec.of(predict, given=("noisy_latents", "timestep"))
    assert dict(spec.inputs) == {"emb": True}


def test_unit_runs_on_plain_values_and_a_fake() -> None:
    assert (
        Unit(encode).run({"prompt": "a"}, {"text_encoder": None, "tokenizer": None})[
            "mask"
        ]
        is None
    )


def test_an_absent_optional_input_takes_the_default_and_other_values_are_not_passed() -> (
    None
):
    class Seen(TypedDict):
        seen: str

    def unit(prompt: str, extra: str = "default") -> Seen:
        return {"seen": f"{prompt} {extra}"}

    assert Unit(unit).run({"prompt": "a", "other": 1}, {}) == {"seen": "a default"}
    assert Unit(unit).run({"prompt": "a", "extra": "b"}, {}) == {"seen": "a b"}


@pytest.mark.parametrize("made", [{"emb": 1}, {"emb": 1, "mask": 2, "more": 3}, {}])
def test_a_unit_must_return_the_keys_that_it_declares(made: dict[str, Any]) -> None:
    def drifts() -> Prompt:
        return made

    with pytest.raises(UsageError) as caught:
        Unit(drifts).run({}, {})
    assert caught.value.where == "unit drifts"
    assert caught.value.what == (
        f"returned keys {sorted(made)}; declared outputs: ['emb', 'mask']"
    )


def kept_bytes(value: Tensor) -> int:
    return value.untyped_storage().nbytes()


def test_what_a_unit_makes_keeps_no_more_storage_than_it_shows() -> None:
    class Views(TypedDict):
        part: Tensor
        parts: list[Tensor]
        turned: Tensor

    whole = torch.arange(100.0)

    def slices() -> Views:
        return {
            "part": whole[:3],
            "parts": [whole[3:5]],
            "turned": whole.view(10, 10).t(),
        }

    made = Unit(slices).run({}, {})
    assert kept_bytes(made["part"]) == 12
    assert kept_bytes(made["parts"][0]) == 8
    assert made["turned"].is_contiguous()
    assert torch.equal(made["turned"], whole.view(10, 10).t())


def test_frames_keep_no_more_storage_than_they_show() -> None:
    class Cut(TypedDict):
        frames: Frames

    def cut() -> Cut:
        return {"frames": Frames(torch.zeros(10, 2, 2, 3, dtype=torch.uint8)[:1], 8.0)}

    assert kept_bytes(Unit(cut).run({}, {})["frames"].pixels) == 12


def test_no_two_outputs_share_storage() -> None:
    class Twins(TypedDict):
        first: Tensor
        second: Tensor

    def twins(value: Tensor) -> Twins:
        return {"first": value, "second": value.view(-1)}

    value = torch.ones(4)
    made = Unit(twins).run({"value": value}, {})
    pointers = {
        tensor.untyped_storage().data_ptr() for tensor in (value, *made.values())
    }
    assert len(pointers) == 3


def test_an_output_that_is_a_weight_is_a_copy_of_it() -> None:
    class Weights(TypedDict):
        bias: Tensor
        row: Tensor

    def weights(*, vae: Any) -> Weights:
        return {"bias": vae.bias, "row": vae.weight[:1]}

    vae = torch.nn.Linear(4, 1)
    made = Unit(weights).run({}, {"vae": vae})
    with torch.no_grad():
        before = [vae.bias.clone(), vae.weight.clone()]
        vae.bias.add_(1)
        vae.weight.add_(1)
    assert torch.equal(made["bias"], before[0])
    assert torch.equal(made["row"], before[1])


def test_a_clone_keeps_the_gradient() -> None:
    weight = torch.ones(4, requires_grad=True)

    class Part(TypedDict):
        part: Tensor

    def live() -> Part:
        return {"part": (weight * 2)[:2]}

    Unit(live).run({}, {})["part"].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 0, 0]


def test_a_buffer_that_is_returned_again_leaves_earlier_outputs_as_they_are() -> None:
    class Filled(TypedDict):
        filled: Tensor

    buffer = torch.zeros(2)

    def fill(number: int) -> Filled:
        return {"filled": buffer.fill_(number)}

    first, second = (Unit(fill).run({"number": i}, {})["filled"] for i in (1, 2))
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


def test_a_unit_that_changes_what_it_is_given_is_named() -> None:
    class Pixels(TypedDict):
        pixels: Tensor

    def scale(image: Tensor, noise: Tensor) -> Pixels:
        return {"pixels": noise.mul_(2) + image}

    def decode(latents: Tensor, image: Tensor) -> Pixels:
        return {"pixels": latents.mul_(2) + image}

    values = {"image": torch.ones(1), "noise": torch.ones(1)}
    with pytest.raises(UsageError, match="unit scale: changes its input 'noise'"):
        Unit(scale).run(values, {})
    with pytest.raises(UsageError, match="unit decode: changes its input 'latents'"):
        Unit(decode, given=("latents",)).run(values, {}, latents=torch.ones(1))


@pytest.mark.parametrize("made", [None, (1, 2), "emb", 3])
def test_what_is_no_record_is_refused(made: Any) -> None:
    def drifts() -> Prompt:
        return made

    kind = type(made).__name__
    with pytest.raises(UsageError, match=f"unit drifts: returned {kind}; declared"):
        Unit(drifts).run({}, {})


def test_an_output_that_cannot_be_stored_is_refused() -> None:
    def lossy() -> Prompt:
        return {"emb": torch.ones(1), "mask": (1, 2)}  # type: ignore[typeddict-item]  # what is tested

    with pytest.raises(UsageError, match="unit lossy: output 'mask' cannot be stored"):
        Unit(lossy).run({}, {})


def test_configuration_belongs_to_its_component() -> None:
    assert (component_of("dit_config"), component_of("vae")) == ("dit", "vae")


def test_a_unit_is_identified_by_its_module_name_version_outputs_and_code() -> None:
    unit = Unit(encode, version=3)
    assert dict(unit.identity) == {
        "module": __name__,
        "name": "encode",
        "version": 3,
        "outputs": dict(unit.outputs),
        "code": code_of(encode).digest,
    }


def test_a_unit_without_source_needs_a_version() -> None:
    without = FunctionType(
        encode.__code__.replace(co_filename="<text>"), encode.__globals__, "encode"
    )
    without.__annotations__ = encode.__annotations__
    without.__kwdefaults__ = encode.__kwdefaults__
    what = rf"unit {__name__}.encode: needs a version: .* has no Python source"
    with pytest.raises(UsageError, match=what):
        assert Unit(without).identity
    assert Unit(without, version=1).identity["version"] == 1


def test_a_unit_may_call_its_function_in_its_own_way() -> None:
    class Twice(Unit):
        def call(self, arguments: Mapping[str, Any]) -> Any:
            return super().call({**arguments, "number": 2 * arguments["number"]})

    def double(number: int) -> Number:
        return {"result": number}

    assert Twice(double).run({"number": 3}, {}) == {"result": 6}
