"""Selective checkpointing of a block in which more happens than its own operators.

torch's own (`create_selective_checkpoint_contexts`) asks that a block runs exactly the same
operators again. A block whose experts are sharded by themselves gathers their weights inside, the
second time at other moments than the first, which torch refuses. Here only the operators to be kept
are looked at; all else may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from armillary.models.layers.recompute import recompute_contexts

Kept = dict[object, list[Any]]
"""Results of the operators to be kept, in the order of their calls."""
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keeping_contexts(operators: frozenset[object]) -> Contexts:
    """`context_fn` of a checkpoint that keeps these operators' results and marks the repetition."""
    kept: Kept = defaultdict(list)
    once, again = recompute_contexts()
    return _Both(once, _Watch(operators, _keep(kept))), _Both(again, _Watch(operators, _give(kept)))


def _keep(kept: Kept) -> Callable[[Any, Callable[[], Any]], Any]:
    def keep(operator: Any, call: Callable[[], Any]) -> Any:
        result = call()
        # Detached, or the graph would hold what holds the graph.
        plain = tree_map_only(Tensor, lambda x: x.detach(), result)
        versions = [x._version for x in tree_leaves(result) if isinstance(x, Tensor)]
        kept[operator].append((plain, versions))
        return result

    return keep


def _give(kept: Kept) -> Callable[[Any, Callable[[], Any]], Any]:
    def give(operator: Any, call: Callable[[], Any]) -> Any:
        if not kept[operator]:
            return call()
        result, versions = kept[operator].pop(0)
        now = [x._version for x in tree_leaves(result) if isinstance(x, Tensor)]
        assert now == versions, f"{operator}: its result was changed in place after it was kept"
        return result

    return give


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Lets `act` answer for the operators of interest."""

    def __init__(
        self, operators: frozenset[object], act: Callable[[Any, Callable[[], Any]], Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._act = operators, act

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled inside is run again as a whole."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See the class."""
        if func in self._operators:
            return self._act(func, lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class _Both:
    """Two contexts as one."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)
