"""Every arrangement of ranks, every pass: the same weights, losses and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_cases import Case, Trace, tiny, traces
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.foundation.errors import UserError
from armillary.parallel import (
    ActivationCheckpointConfig,
    Compile,
    EveryK,
    Full,
    NoCheckpoint,
    Parallel,
    Scale,
    Selective,
)
from armillary.parallel.activation_checkpoint import checkpoint_activations
from armillary.parallel.compile import compile_blocks
from armillary.parallel.config import COSTLY_OPERATORS
from armillary.parallel.materialise import materialise
from armillary.parallel.operators import known_operators, operators_named
from armillary.precision import Precision
from ranks import run_ranks

FP32 = Precision(compute="float32")
PLAIN = Scale(precision=FP32)
BF16 = Scale()
LAST_ONLY = Parallel(sync_every_microbatch=False)
RECOMPUTED_COMPILED = Scale(
    precision=FP32,
    activation_checkpoint=Selective(),
    compile=Compile(enabled=True, backend="aot_eager"),
)


def _on(parallel: Parallel, scale: Scale = PLAIN, **changes: Any) -> Case:
    return Case(scale=replace(scale, parallel=parallel), **changes)


CASES = {
    2: {
        "DDP 2": _on(Parallel(dp_replicate=2)),
        "DDP 2, two microbatches": _on(Parallel(dp_replicate=2), microbatches=2),
        "FSDP 2": _on(Parallel()),
        "FSDP 2, kept after forward": _on(Parallel(reshard_after_forward=False)),
        "FSDP 2, four microbatches": _on(Parallel(), microbatches=4),
        "FSDP 2, four microbatches, one reduction": _on(LAST_ONLY, microbatches=4),
        "FSDP 2, tied": _on(Parallel(), tied=True, microbatches=2),
        "DDP 2, tied": _on(Parallel(dp_replicate=2), tied=True),
        "FSDP 2, recomputed and compiled": _on(Parallel(), RECOMPUTED_COMPILED, microbatches=2),
        "FSDP 2, experts": _on(Parallel(), experts=True, microbatches=2),
        "FSDP 2, kept on the host, nothing gathered ahead": _on(
            Parallel(cpu_offload=True, prefetch=0), microbatches=2
        ),
        "FSDP 2, bfloat16": _on(Parallel(), BF16),
        "DDP 2, bfloat16": _on(Parallel(dp_replicate=2), BF16, microbatches=2),
    },
    4: {
        "FSDP 4": _on(Parallel()),
        "HSDP 2x2": _on(Parallel(dp_replicate=2)),
        "HSDP 2x2, two microbatches": _on(Parallel(dp_replicate=2), microbatches=2),
        "HSDP 2x2, two microbatches, one reduction": _on(
            replace(LAST_ONLY, dp_replicate=2), microbatches=2
        ),
        "HSDP 2x2, bfloat16": _on(Parallel(dp_replicate=2), BF16),
        "HSDP 2x2, tied": _on(Parallel(dp_replicate=2), tied=True, microbatches=2),
        "HSDP 2x2, experts": _on(Parallel(dp_replicate=2), experts=True),
        "FSDP 4, experts cut along rows": _on(Parallel(ep=2, prefetch=2), experts=True),
        "FSDP 4 x EP 4": _on(Parallel(ep=4), experts=True, microbatches=2),
        "TP 2 x FSDP 2, tied": _on(Parallel(tp=2), tied=True, microbatches=2),
        "TP 2 x FSDP 2, experts": _on(Parallel(tp=2, ep=2, expert_tp=2), experts=True),
        "CP 2 x FSDP 2": _on(Parallel(cp=2), microbatches=2),
        "PP 2 x FSDP 2, tied": _on(Parallel(pp=2), tied=True, microbatches=2),
        "PP 2 x TP 2, experts": _on(Parallel(pp=2, tp=2), experts=True, microbatches=2),
    },
}
TOLERANCE = 1e-6
"""Relative: the order of float32 sums (measured: 2e-7)."""
Kind = tuple[str, bool, bool, int]


def _kind(case: Case, ranks: int = 1) -> Kind:
    """What decides the answer. In bfloat16 a part's gradient is rounded before parts are added."""
    in_bfloat16 = case.scale.precision == BF16.precision
    parts = case.microbatches * ranks if in_bfloat16 else 1
    return case.scale.precision.compute, case.tied, case.experts, parts


@pytest.fixture(scope="module")
def oracles() -> dict[Kind, Trace]:
    """By one process."""
    cases = [Case(scale=PLAIN, tied=tied) for tied in (False, True)]
    cases += [Case(scale=PLAIN, experts=True)]
    cases += [Case(scale=BF16, microbatches=parts) for parts in (1, 2, 4)]
    return dict(zip(map(_kind, cases), traces(cases), strict=True))


def assert_same(
    trace: Trace, oracle: Trace, tolerance: float = TOLERANCE, loss_tolerance: float = TOLERANCE
) -> None:
    """Names and weights to the bit; losses and gradients within the tolerances."""
    assert trace.names == oracle.names
    assert trace.initial == oracle.initial
    assert trace.losses == pytest.approx(oracle.losses, rel=loss_tolerance)
    assert trace.norm == pytest.approx(oracle.norm, rel=tolerance)
    assert trace.norms == pytest.approx(oracle.norms, rel=tolerance)
    assert trace.statistics == pytest.approx(oracle.statistics, rel=TOLERANCE)
    assert trace.gradients.keys() == oracle.gradients.keys()
    for name, expected in oracle.gradients.items():
        error = (trace.gradients[name] - expected).norm() / expected.norm()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("world_size", CASES)
def test_weights_losses_and_gradients_do_not_depend_on_the_mesh(
    world_size: int, oracles: dict[Kind, Trace]
) -> None:
    cases = CASES[world_size]
    for rank in run_ranks(traces, world_size, list(cases.values())):
        for (name, case), trace in zip(cases.items(), rank, strict=True):
            try:
                assert_same(trace, oracles[_kind(case, world_size)])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_in_bfloat16_a_finer_split_only_rounds_more_partial_gradients(
    oracles: dict[Kind, Trace],
) -> None:
    for parts in (2, 4):  # measured: losses 1e-7, gradients 2.6e-3 (a rounding is up to 2^-9)
        whole, split = (oracles["bfloat16", False, False, count] for count in (1, parts))
        assert_same(split, whole, tolerance=5e-3, loss_tolerance=1e-5)


CHECKPOINTS = [Full(), EveryK(k=2), Selective(), Selective(save=("aten::mm",))]


def test_recomputation_changes_no_bit(oracles: dict[Kind, Trace]) -> None:
    cases = [Case(scale=replace(PLAIN, activation_checkpoint=each)) for each in CHECKPOINTS]
    oracle = oracles[_kind(cases[0])]
    for case, trace in zip(cases, traces(cases), strict=True):
        assert trace.losses == oracle.losses, case
        for name, expected in oracle.gradients.items():
            assert torch.equal(trace.gradients[name], expected), (case, name)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[object] = Counter()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls[function] += 1
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("config", "attentions"),
    [
        (NoCheckpoint(), 2),
        (Full(), 4),
        (EveryK(k=2), 3),
        (Selective(), 2),
        (Selective(save=("aten::mm",)), 4),
    ],
)
def test_kept_operators_run_once_and_others_twice(
    config: ActivationCheckpointConfig, attentions: int
) -> None:
    with torch.device("meta"):
        model = tiny().build()
    checkpoint_activations(model, config)
    materialise(model, torch.device("cpu"), 0)
    with _Count() as count:
        model(torch.arange(8)[None]).sum().backward()
    assert count.calls[torch.ops.armillary.blocked_attention.default] == attentions


def test_operators_have_names_that_torch_knows() -> None:
    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
    assert all(operators_named((name,)) for name in COSTLY_OPERATORS)  # importing models loads them
    by_namespace = {name for name in COSTLY_OPERATORS if not name.startswith("higher_order")}
    assert by_namespace <= known_operators()
    assert operators_named(("aten::no_such_operator", "nowhere::mm")) == []
    with pytest.raises(UserError, match="'aten::m', and torch has no such operator"):
        checkpoint_activations(tiny().build(), Selective(save=("aten::m",)))


@pytest.mark.parametrize("config", [NoCheckpoint(), Selective()], ids=["plain", "selective"])
def test_blocks_of_one_shape_share_one_compilation(config: ActivationCheckpointConfig) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with torch.device("meta"):
        model = tiny().build()
    checkpoint_activations(model, config)
    compile_blocks(model, Compile(enabled=True, backend="eager"))
    materialise(model, torch.device("cpu"), 0)
    model(torch.arange(8)[None])
    assert counters["stats"]["unique_graphs"] == 1
    assert [name for name, _ in model.named_parameters()] == list(model.initializers())
