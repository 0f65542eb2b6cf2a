"""Ways to compute causal attention inside packed documents, behind one interface."""

from __future__ import annotations

from armillary.foundation.errors import Problem
from armillary.models.layers.backends.base import AttentionBackend, Visible
from armillary.models.layers.backends.blocked import Blocked
from armillary.models.layers.backends.flex import Flex
from armillary.models.layers.backends.sdpa import Sdpa
from armillary.models.layers.backends.varlen import Varlen

BACKENDS: dict[str, AttentionBackend] = {
    "blocked": Blocked(),
    "sdpa": Sdpa(),
    "flex": Flex(),
    "varlen": Varlen(),
}

__all__ = ["BACKENDS", "AttentionBackend", "Visible", "attention_problems", "backend_for"]


def backend_for(name: str, device_type: str) -> AttentionBackend:
    """The backend called `name`; "auto" is the fastest exact one on the device."""
    if name != "auto":
        return BACKENDS[name]
    if device_type == "cpu":
        return BACKENDS["blocked"]
    flex_runs = device_type == "cuda" and not BACKENDS["flex"].problems(device_type, training=True)
    return BACKENDS["flex" if flex_runs else "sdpa"]


def attention_problems(name: str, device_type: str, *, training: bool) -> list[Problem]:
    """Why the backend called `name` ("auto" included) cannot be used there; empty if it can."""
    return backend_for(name, device_type).problems(device_type, training=training)
