"""A change of code is seen without anybody raising a version: the values of all units whose
modules it can reach are computed again, and no others.

The units are those of a package `own`, whose modules are written, changed and imported
anew.
"""

import importlib
import py_compile
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from dstrain import StateError, UsageError
from dstrain.graph.code_digest import Code
from dstrain.runs import Setup

from tests.support import caching_family
from tests.support.caching_project import Place, log_units, write_place
from tests.support.runs import tree

pytestmark = pytest.mark.promise(
    "R6", "a change of code: what it can reach is computed again, and nothing else"
)
OWN = MappingProxyType(
    {
        "units": """
from own.describing import describe
from own.images import encode_image
from own.prompts import encode_prompt
""",
        "prompts": '''
from typing import Any

import torch
from tests.support.caching_family import Prompt, ran


def encode_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, dtype: torch.dtype
) -> Prompt:
    """Return the text encoder's states."""
    ran("encode_prompt")
    ids = torch.tensor([[0, *((ord(one) + tokenizer) % 64 for one in prompt)]])
    return {"prompt_emb": 1.0 * text_encoder(ids).to(dtype)}
''',
        "describing": '''
from typing import Any, TypedDict

import torch
from torch import Tensor

from tests.support.caching_family import Facts, ran


class Description(TypedDict):
    """Facts about a prompt."""

    facts: Facts
    layers: list[Tensor]
    title: str


def describe(prompt: str, label: str = "x", *, dit_config: Any) -> Description:
    ran("describe")
    words = len(prompt.split())
    # Not imported before the unit runs.
    from own import late

    first = torch.tensor([words * late.FACTOR])
    facts: Facts = {"words": words, "ratio": float(len(label)), "short": False, "nothing": None, "first": first}
    return {"facts": facts, "layers": [torch.ones(1, 2)], "title": prompt}
''',
        "images": '''
from typing import Any, TypedDict

import numpy as np
import torch
from dstrain.models.functional import to_minus_one_one
from PIL import Image
from torch import Tensor

from own import pixels


class Latents(TypedDict):
    """An image in latent space."""

    input_latents: Tensor
    thumbnail: Tensor


@pixels.counted("encode_image")
def encode_image(input_image: Image.Image, *, vae: Any, dtype: torch.dtype) -> Latents:
    # A comment.
    frames = to_minus_one_one(torch.from_numpy(np.array(input_image))[None])
    latents = vae(pixels.whitened(frames).to(dtype)).float()
    return {"input_latents": latents, "thumbnail": latents[:, :, ::8, ::8]}
''',
        "pixels": '''
from functools import wraps

from tests.support.caching_family import ran

MEAN = 0.5
UNUSED = 1


def counted(name):
    """Note each call."""

    def decorate(function):
        @wraps(function)
        def counts(*args, **named):
            ran(name)
            return function(*args, **named)

        return counts

    return decorate


def whitened(frames):
    return (frames - MEAN) / 2
''',
        "late": "FACTOR = 1\n",
        "others": "A = 1\n",
    }
)
PROMPT, DESCRIPTION, IMAGE = (
    Counter({"encode_prompt": 3}),
    Counter({"describe": 3}),
    Counter({"encode_image": 4}),
)
ALL = PROMPT + DESCRIPTION + IMAGE


@dataclass(frozen=True)
class Change:
    """An edit of one module: what stands there, what instead, and how often each unit
    runs then.
    """

    name: str
    module: str
    old: str
    new: str
    computed: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CHANGES = (
    Change("a module imported late", "late", "FACTOR = 1", "FACTOR = 2", DESCRIPTION),
    Change("a unit's own number", "prompts", "1.0 *", "2.0 *", PROMPT),
    Change(
        "kind of an output",
        "images",
        "    thumbnail: Tensor",
        "    thumbnail: Tensor | None",
        IMAGE,
    ),
    Change("a comment", "images", "# A comment.", "# Another one."),
    Change("what a module has beside", "pixels", "UNUSED = 1", "UNUSED = 2", IMAGE),
    Change("a module that no unit imports", "others", "A = 1", "A = 2"),
)
MORE_THAN_CODE = ("kind of an output",)
"""Changes of what a unit is, which a flag for changes of code does not accept."""


class Units:
    """The package, as files and as the units of the family."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "own"
        self.folder.mkdir()
        (self.folder / "__init__.py").touch()
        self.patch = patch
        self.load(OWN)

    def load(self, modules: Mapping[str, str]) -> None:
        """Write modules, import them anew, and take the units."""
        for name, text in modules.items():
            (self.folder / f"{name}.py").write_text(text)
        forget()
        importlib.invalidate_caches()
        found = importlib.import_module("own.units")
        names = ("encode_prompt", "describe", "encode_image")
        self.take(*(getattr(found, name) for name in names))

    def take(self, *functions: Callable[..., Any]) -> None:
        """Replace the family's units."""
        self.patch.setattr(caching_family, "UNITS", functions)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    log_units(monkeypatch, tmp_path)
    return write_place(tmp_path / "place")


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Units]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    yield Units(tmp_path, monkeypatch)
    forget()


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_change_of_code_is_seen(change: Change, place: Place, units: Units) -> None:
    assert place.fill() == ALL
    before = place.values()
    text = OWN[change.module]
    assert text.count(change.old) == 1
    units.load({**OWN, change.module: text.replace(change.old, change.new)})
    if change.computed:
        # Stage 2 alone does not use what the old code has computed.
        with pytest.raises(
            StateError, match=r"unit \w+ (code of own|outputs)"
        ) as error:
            place.stored()
        is_more = change.name in MORE_THAN_CODE
        assert ("--accept_code_change" in str(error.value)) != is_more
        if is_more:
            with pytest.raises(StateError):
                place.stored(accept_code_change=True)
        else:
            assert place.values(accept_code_change=True) == before
    assert place.fill() == change.computed
    fresh = place.folder / "fresh"
    place.fill(feature_cache=fresh)
    assert place.values() == place.values(feature_cache=fresh)
    assert place.fill() == {}
    # And what was computed before is there again.
    units.load(OWN)
    assert place.fill() == {}


def test_the_code_of_a_component_counts(
    place: Place, units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a family's own tokenizer does is a part of what its units do."""
    assert place.fill() == ALL
    *others, tokenizer = caching_family.COMPONENTS
    assert tokenizer.name == "tokenizer"
    code = Code({"code of own.components": "changed"}, ())
    monkeypatch.setattr(
        "dstrain.runs.recorded_versions.code_of_module", lambda module: code
    )
    with pytest.raises(StateError, match="component tokenizer"):
        place.stored()
    assert place.fill() == PROMPT + IMAGE
    assert place.fill() == {}
    others.append(replace(tokenizer, version=1))
    monkeypatch.setattr(caching_family, "COMPONENTS", others)
    assert place.fill() == PROMPT


def test_code_without_source_needs_a_version(
    place: Place, units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, _, image = caching_family.UNITS
    source = units.folder.parent / "compiled.py"
    source.write_text(OWN["describing"])
    py_compile.compile(str(source), str(units.folder / "compiled.pyc"))
    units.take(prompt, importlib.import_module("own.compiled").describe, image)
    with pytest.raises(UsageError, match="has no Python source") as caught:
        place.fill()
    assert "@versioned(1)" in str(caught.value)
    assert str(caught.value.where) == "unit own.compiled.describe"
    monkeypatch.setattr(caching_family, "VERSIONS", {"describe": 1})
    assert place.fill() == ALL
    assert place.fill() == {}
    monkeypatch.setattr(caching_family, "VERSIONS", {"describe": 2})
    assert place.fill() == DESCRIPTION


def test_other_versions_of_libraries_are_named_once_and_accepted(
    place: Place,
    units: Units,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert place.fill() == ALL
    here = place.setup().versions
    place.stored()
    assert "other versions" not in caplog.text
    others = {**here, "torch": "0.1", "pillow": "0.2"}
    monkeypatch.setattr(Setup, "versions", others)
    place.stored()
    (record,) = [one for one in caplog.records if "other versions" in one.message]
    assert record.message.endswith(
        f"was filled with other versions: torch {here['torch']} (here 0.1),"
        f" pillow {here['pillow']} (here 0.2); its values are used"
    )
    assert place.fill() == {}


def test_a_cache_of_an_older_format_is_refused_and_left_as_it_is(
    place: Place, units: Units
) -> None:
    assert place.fill() == ALL
    (place.cache / "store.json").write_text(
        '{"format": "dstrain-features", "version": 1}'
    )
    before = tree(place.cache)
    for use in (place.fill, place.stored):
        with pytest.raises(StateError, match="is that of another format") as error:
            use()
        assert "--feature_cache NEW_FOLDER" in str(error.value)
        assert tree(place.cache) == before
    assert place.fill(feature_cache=place.folder / "new") == ALL
    assert place.values(feature_cache=place.folder / "new")
