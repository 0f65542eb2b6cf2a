"""What a dispatch mode has to know of an operator it sees; the private parts of torch for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._library.custom_ops import _maybe_get_opdef
from torch.distributed import ProcessGroup

from armillary.parallel.collectives import resolve_group


def name(operator: Any) -> str:
    """Namespace and name of an operator, without its overload, as `c10d::allreduce_`."""
    return str(operator._schema.name)


def arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those left to their defaults are missing."""
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def group_of(named: Mapping[str, Any]) -> ProcessGroup:
    """The group of a collective: operators of c10d get it boxed, functional ones its name."""
    if "process_group" in named:
        return ProcessGroup.unbox(named["process_group"])
    return resolve_group(named["group_name"])


def call_kernel(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls what an operator written in Python does, past torch's dispatch of the operator itself.

    So modes that are entered see the operators inside.
    """
    definition = _maybe_get_opdef(operator)
    if definition is None:
        return operator(*args, **kwargs)
    with torch.no_grad():  # an operator with a gradient of its own has recorded it by now
        return definition._init_fn(*args, **kwargs)
