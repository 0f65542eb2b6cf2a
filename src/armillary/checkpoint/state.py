"""Model and optimizers as one set of named tensors, and back.

Names: `model.<parameter>` and `optimizer.<parameter>.<key>`, with the parameter's name as the
model file has it: wrappers that compile or recompute leave no trace, and neither do parameter
groups or the number of optimizers. A tied parameter is there once, under its first name. The
tensors are the live ones, so that loading fills the model in place.

Of a model that is spread over ranks, each tensor is a view of the whole over what is here
(`ParallelModel.whole_view`), so neither the names nor the shapes of a checkpoint know of the mesh;
the parts that ranks hold, stages of a pipeline among them, are together the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.checkpoint.load import load_tensors
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.tensors import flatten

if TYPE_CHECKING:
    from armillary.checkpoint.find import Found
    from armillary.checkpoint.store import CheckpointStore

T = TypeVar("T")

State = dict[str, dict[str, Tensor]]


@runtime_checkable
class Spread(Protocol):
    """What a rank holds of a model; `ParallelModel` is one."""

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """Parameters and persistent buffers held here, by the names of the plain model."""

    def whole_view(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or anything cut as it is, as a view of the whole."""


WholeView = Callable[[str, Tensor], Tensor]

Model = nn.Module | Spread
"""A model whose tensors are whole, or show it as DTensors; or what a rank holds of one."""


def gather_state(model: Model, optimizers: Sequence[Optimizer] = ()) -> State:
    """`{"model": {name: tensor}, "optimizer": {name.key: tensor}}`, live and detached.

    Counters that an optimizer keeps as python numbers become scalar tensors; `apply_state` puts
    them back.
    """
    named = _named_tensors(model)
    whole = model.whole_view if isinstance(model, Spread) else None
    state: State = {"model": {n: _whole(whole, n, tensor, tensor) for n, tensor in named.items()}}
    if optimizers:
        state["optimizer"] = {
            f"{name}.{key}": _whole(whole, name, named[name], _as_tensor(value, f"{name}.{key}"))
            for name, values in _optimizer_states(named, optimizers)
            for key, value in values.items()
        }
    return state


def apply_state(state: State, model: Model, optimizers: Sequence[Optimizer]) -> None:
    """Ends a load into `gather_state`'s tensors: puts python numbers back into the optimizers."""
    for name, values in _optimizer_states(_named_tensors(model), optimizers):
        for key, value in values.items():
            if not isinstance(value, Tensor):
                loaded = state["optimizer"][f"{name}.{key}"].item()
                values[key] = type(value)(loaded)


def initialise_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Creates the state of parameters that have not been stepped yet, for a load to fill.

    Takes a step at learning rate 0 with gradients 0, as optimizers make their state in `step` and
    only they know its shapes, dtypes and devices. Rates and gradients are as before on return;
    counters are not 0, so only a load that overwrites them may follow.
    """
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        fresh = {p for p in parameters if p.requires_grad and not optimizer.state.get(p)}
        if not fresh:
            continue
        gradients = [p.grad for p in parameters]
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            for p in parameters:
                p.grad = torch.zeros_like(p) if p in fresh else None
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
            optimizer.step()
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def restore_training(
    store: CheckpointStore,
    found: Found,
    model: Model,
    optimizers: Sequence[Optimizer],
    *,
    further: State | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], bytes | None]:
    """Loads a checkpoint into a model and its optimizers, exactly, on whatever mesh they are.

    Args:
        store: that holds it.
        found: it.
        model: to fill.
        optimizers: of the model.
        further: other tensors that it has to hold, to fill as well.
        check: see `CheckpointStore.load`.

    Returns:
        The store's scalars and this rank's random states, if the checkpoint has any for it.

    Raises:
        UserError: names, shapes or dtypes differ; nothing was loaded.
    """
    return fill_training(
        model,
        optimizers,
        store.tensors_in(found),
        lambda state: store.load(found, state | (further or {}), check),
        # Steps before the first healthy one learned from no token.
        never_updated=found.step == 0 or found.manifest["tokens_total"] == 0,
    )


def fill_training(
    model: Model,
    optimizers: Sequence[Optimizer],
    names: Collection[str],
    fill: Callable[[State], T],
    *,
    never_updated: bool,
) -> T:
    """Has `fill` write the state of another run into a model and its optimizers.

    A parameter without any optimizer state there had none when it was written (it never got a
    gradient) and has none afterwards.

    Args:
        model: to fill.
        optimizers: of the model.
        names: of the tensors that come.
        fill: given the live tensors.
        never_updated: whether the optimizers may have had no state at all when it was written.
    """
    initialise_optimizers(optimizers)
    _drop_states_never_made(_named_tensors(model), optimizers, names, never_updated)
    state = gather_state(model, optimizers)
    result = fill(state)
    apply_state(state, model, optimizers)
    return result


def restore_model(found: Found, model: Model) -> None:
    """Loads the weights alone, for inference; in one process or, called by all ranks, in many.

    Raises:
        UserError: names or shapes differ; nothing was loaded.
        RunError: a file could not be read.
    """
    wanted = flatten(gather_state(model))
    ranks = Ranks()
    try:
        load_tensors(found, wanted, ranks, ignore=("optimizer.", "outer."), any_dtype=True)
    finally:
        ranks.close()


def _drop_states_never_made(
    named: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    stored: Collection[str],
    never_updated: bool,
) -> None:
    names = {id(tensor): name for name, tensor in named.items()}
    for optimizer in optimizers:
        held = {
            p: any(key.startswith(f"optimizer.{names[id(p)]}.") for key in stored)
            for p in list(optimizer.state)
        }
        if never_updated or any(held.values()):
            for p in [p for p, is_held in held.items() if not is_held]:
                del optimizer.state[p]


def _whole(whole: WholeView | None, name: str, tensor: Tensor, value: Tensor) -> Tensor:
    """A tensor of the model, or a value of its optimizer that may be cut like it, as a whole."""
    live = value.detach() if value.requires_grad else value
    return whole(name, live) if whole is not None and live.shape == tensor.shape else live


def _named_tensors(model: Model) -> dict[str, Tensor]:
    """Parameters and persistent buffers, tied ones once."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    # keep_vars: the parameters themselves, to be recognised in the optimizers. state_dict rather
    # than named_parameters: data sharding's hooks see to it that these are the sharded ones.
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert isinstance(tensor, Tensor), f"{name}: extra state is not supported"
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def _optimizer_states(
    named: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> list[tuple[str, dict[str, Any]]]:
    names = {id(tensor): name for name, tensor in named.items()}
    parameters = [
        (optimizer, p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    strangers = [tuple(p.shape) for _, p in parameters if id(p) not in names]
    assert not strangers, f"optimizers hold parameters that the model does not: {strangers}"
    assert len({id(p) for _, p in parameters}) == len(parameters), "two optimizers share parameters"
    return [
        (names[id(p)], optimizer.state[p]) for optimizer, p in parameters if p in optimizer.state
    ]


def _as_tensor(value: object, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    assert isinstance(value, int | float), f"optimizer state {name} is a {type(value).__name__}"
    return torch.tensor(value, dtype=torch.float64)
