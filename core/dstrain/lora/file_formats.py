"""What a format of LoRA files is: how a program names layers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from dstrain.config import LoraFile
from dstrain.config.options.output import OutputOptions
from dstrain.lora.reading.contents import Lora
from dstrain.models import Config, Shapes
from dstrain.models.components import Component
from dstrain.models.formats import CheckpointFormat
from dstrain.registry import ModelFamily


@dataclass(frozen=True)
class LoraSource:
    """A LoRA file and the networks that it may be for; most fields are arguments of
    `read_lora`.
    """

    file: LoraFile
    tensors: Mapping[str, Tensor]
    header: Mapping[str, str]
    family: ModelFamily
    networks: Mapping[str, Shapes]
    """Component -> the shapes of its weights."""
    unused_parameters: Mapping[str, Collection[str]]
    is_one_of_several: bool = False

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self.file.path

    @property
    def component(self) -> str:
        """Return the component that the command or the header names, else the one that
        the family trains by default.
        """
        named = self.file.component or self.header.get("component", "")
        return named or self.family.default_trainable


class LoraFormat:
    """The names of layers in the LoRA files of a program: plugins subclass it.

    A format that cannot write files leaves `has_names` as it is.
    """

    name: ClassVar[str] = ""
    """A value of --lora_format."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other values that mean the same."""
    title: ClassVar[str] = ""
    """The program, where a run says how to convert files for it."""
    fallback: ClassVar[bool] = False
    """Whether it is asked only about files that no other format reads."""

    def reads(self, keys: Collection[str], header: Mapping[str, str]) -> bool:
        """Return whether a file is in this format, by its keys and its header."""
        return False

    def components(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        family: ModelFamily,
    ) -> list[tuple[str, ...]]:
        """Return the components that layers of a file may be of: for each group of names
        that begin alike, those that they allow.
        """
        return [tuple(family.lora_prefixes)]

    def read(self, source: LoraSource) -> list[Lora]:
        """Return what a file holds of each component; raises StateError for a file that
        is damaged or does not fit, or ValueError to say the same without its path.
        """
        raise NotImplementedError

    def asked_by(self, options: OutputOptions) -> str:
        """Return the option of the plugin that asks a run to save in this format, where
        --lora_format says none; '' if it is not given. `options` are those of a run.
        """
        return ""

    def has_names(
        self, component: Component, family: ModelFamily, lora_type: str
    ) -> bool:
        """Return whether it has names for layers of this type in a component."""
        return False

    def check(
        self,
        layers: Collection[str],
        lora_type: str,
        component: Component,
        family: ModelFamily,
        shapes: Shapes,
    ) -> None:
        """Raise UsageError for layers of a network that cannot be written, before they
        are trained.
        """

    def write(
        self, lora: Lora, family: ModelFamily, shapes: Shapes
    ) -> dict[str, Tensor]:
        """Return the tensors of a file, with alpha / rank as part of the matrices.

        Args:
            lora: The layers of one component.
            family: The family.
            shapes: The shapes of the component's weights.
        """
        raise NotImplementedError

    def weights(
        self, component: Component, family: ModelFamily, config: Config
    ) -> CheckpointFormat | None:
        """Return the names of all weights of a component with this configuration; None
        where the program has none.
        """
        return None

    def needs_export(
        self, component: Component, family: ModelFamily, lora_type: str, saved: str
    ) -> bool:
        """Return whether the program reads a file only once `dstrain export` has
        converted it.

        saved: The format that the file has.
        """
        return False
