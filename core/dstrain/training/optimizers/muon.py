"""Muon for matrices and AdamW for everything else, as one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon as MatrixMuon, Optimizer

KIND = "kind"
"""Entry of a group: which of the two optimizes it."""


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for matrices, AdamW for other tensors.

    Updates of matrices are scaled to the size that AdamW's have (Liu et al. 2025, "Muon
    is scalable for LLM training"), so that one learning rate serves both. To the outside
    it is one optimizer with one state.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Split every group in two; momentum, nesterov and ns_steps are Muon's, betas and
        eps AdamW's.
        """
        self._matrices = MatrixMuon(
            [nn.Parameter(torch.zeros(1, 1))],
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        self._others = AdamW(
            [nn.Parameter(torch.zeros(1))], lr, betas, eps, weight_decay, fused=True
        )
        given: list[Any] = list(params)
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        split = []
        for group in groups:
            matrices = [one for one in group["params"] if one.ndim == 2]
            others = [one for one in group["params"] if one.ndim != 2]
            if matrices:
                own = {**self._matrices.defaults, **group, "params": matrices}
                split.append({**own, KIND: "muon"})
            if others:
                own = {**self._others.defaults, **group, "params": others}
                split.append({**own, KIND: "adamw"})
        super().__init__(split, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has two forms
        """Make a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, one in (("muon", self._matrices), ("adamw", self._others)):
            one.param_groups = [g for g in self.param_groups if g[KIND] == kind]
            one.state = self.state
            if one.param_groups:
                step: Callable[[], Any] = one.step
                step()
        return loss
