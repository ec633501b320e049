"""What composite operations read of a layer's weights. Whoever loads a model has types of its own with these attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Projection = Any
"""A linear layer as its loader keeps it, quantised or not: only `Project` and a fused variant look inside."""
Project = Callable[[Tensor, Projection], Tensor]
"""Applies a linear layer: (T, in) to (T, out)."""


class GatedWeights(Protocol):
    """A gated feed-forward part; gate and up lie end to end."""

    @property
    def gate_up(self) -> Projection: ...

    @property
    def down(self) -> Projection: ...


@runtime_checkable
class ExpertWeights(Protocol):
    """A mixture of experts, as stacks: gate_up (E, 2 · intermediate, hidden), down (E, hidden, intermediate)."""

    @property
    def router(self) -> Projection: ...

    @property
    def gate_up(self) -> Projection: ...

    @property
    def down(self) -> Projection: ...

    @property
    def shared(self) -> GatedWeights | None: ...

    @property
    def shared_gate(self) -> Projection | None: ...


class LayerWeights(Protocol):
    """One decoder layer; Q, K and V lie end to end. Norms: (hidden,), those of heads (D,) or None."""

    @property
    def input_norm(self) -> Tensor: ...

    @property
    def qkv(self) -> Projection: ...

    @property
    def query_norm(self) -> Tensor | None: ...

    @property
    def key_norm(self) -> Tensor | None: ...

    @property
    def output(self) -> Projection: ...

    @property
    def mlp_norm(self) -> Tensor: ...

    @property
    def mlp(self) -> GatedWeights | ExpertWeights: ...
