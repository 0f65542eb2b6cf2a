"""Ways to compute causal attention inside packed documents, behind one interface."""

from __future__ import annotations

from armillary.foundation.errors import Problem
from armillary.models.layers.backends.base import AttentionBackend, Conditions, Visible
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

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "Conditions",
    "Visible",
    "attention_problems",
    "backend_for",
]


def backend_for(name: str, device_type: str, head_width: int) -> AttentionBackend:
    """The backend called `name`; "auto" is the fastest exact one that runs on the device."""
    if name != "auto":
        return BACKENDS[name]
    if device_type == "cpu":
        return BACKENDS["blocked"]
    conditions = Conditions(device_type=device_type, head_width=head_width)
    flex_runs = device_type == "cuda" and not BACKENDS["flex"].problems(conditions)
    return BACKENDS["flex" if flex_runs else "sdpa"]


def attention_problems(name: str, conditions: Conditions) -> list[Problem]:
    """Why the backend called `name` ("auto" included) cannot be used so; empty if it can."""
    backend = backend_for(name, conditions.device_type, conditions.head_width)
    return backend.problems(conditions)
