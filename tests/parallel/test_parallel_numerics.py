"""Every arrangement of ranks, every pass: the same weights, losses and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parallel_cases import Case, Trace, traces

from armillary.parallel import Compile, EveryK, Full, Parallel, Scale, Selective
from armillary.precision import Precision
from ranks import run_ranks

FP32 = Precision(compute="float32")
PLAIN = Scale(precision=FP32)
LAST_ONLY = Parallel(sync_every_microbatch=False)


def _on(parallel: Parallel, **changes: object) -> Case:
    return Case(scale=replace(PLAIN, parallel=parallel), **changes)  # type: ignore[arg-type]


MESHES = {
    2: {
        "DDP 2": _on(Parallel(dp_replicate=2)),
        "DDP 2, two microbatches": _on(Parallel(dp_replicate=2), microbatches=2),
        "FSDP 2": _on(Parallel()),
        "FSDP 2, kept after forward": _on(Parallel(reshard_after_forward=False)),
        "FSDP 2, four microbatches": _on(Parallel(), microbatches=4),
        "FSDP 2, four microbatches, one reduction": _on(LAST_ONLY, microbatches=4),
        "FSDP 2, tied": _on(Parallel(), tied=True, microbatches=2),
        "DDP 2, tied": _on(Parallel(dp_replicate=2), tied=True),
    },
    4: {
        "FSDP 4": _on(Parallel()),
        "HSDP 2x2": _on(Parallel(dp_replicate=2)),
        "HSDP 2x2, two microbatches": _on(Parallel(dp_replicate=2), microbatches=2),
        "HSDP 2x2, two microbatches, one reduction": _on(
            replace(LAST_ONLY, dp_replicate=2), microbatches=2
        ),
    },
}
SELECTIVE_COMPILED = Scale(
    precision=FP32,
    activation_checkpoint=Selective(),
    compile=Compile(enabled=True, backend="aot_eager"),
)
BF16 = Scale(precision=Precision())


@pytest.fixture(scope="module")
def oracles() -> dict[bool, Trace]:
    untied, tied = traces([Case(scale=PLAIN), Case(scale=PLAIN, tied=True)])
    return {False: untied, True: tied}


def assert_same(trace: Trace, oracle: Trace, tolerance: float = 1e-6) -> None:
    """Equal names and weights, and losses and gradients up to the order of float32 sums."""
    assert trace.names == oracle.names
    assert trace.initial == oracle.initial
    assert trace.losses == pytest.approx(oracle.losses, rel=tolerance)
    assert trace.gradients.keys() == oracle.gradients.keys()
    for name, expected in oracle.gradients.items():
        error = (trace.gradients[name] - expected).norm() / expected.norm()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("world_size", MESHES)
def test_weights_losses_and_gradients_do_not_depend_on_the_mesh(
    world_size: int, oracles: dict[bool, Trace]
) -> None:
    cases = MESHES[world_size]
    for ranks in run_ranks(traces, world_size, list(cases.values())):
        for (name, case), trace in zip(cases.items(), ranks, strict=True):
            try:
                assert_same(trace, oracles[case.tied])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_what_is_recomputed_or_compiled_changes_no_bit(oracles: dict[bool, Trace]) -> None:
    torch.set_num_threads(1)
    choices = [Full(), EveryK(k=2), Selective(), Selective(save=("aten::mm",))]
    scales = [replace(PLAIN, activation_checkpoint=choice) for choice in choices]
    for scale, trace in zip(scales, traces([Case(scale=s) for s in scales]), strict=True):
        assert trace.losses == oracles[False].losses, scale
        for name, expected in oracles[False].gradients.items():
            assert torch.equal(trace.gradients[name], expected), (scale, name)


def test_compiled_and_checkpointed_blocks_shard_like_plain_ones(
    oracles: dict[bool, Trace],
) -> None:
    cases = [
        Case(scale=SELECTIVE_COMPILED),
        Case(scale=replace(SELECTIVE_COMPILED, parallel=Parallel(dp_replicate=-1, dp_shard=1))),
    ]
    for trace in traces(cases[:1]) + run_ranks(traces, 2, cases)[0]:
        assert_same(trace, oracles[False])


def test_bfloat16_follows_one_policy_in_one_process_and_over_ranks() -> None:
    alone = traces([Case(scale=BF16)])[0]
    for trace in run_ranks(
        traces, 2, [Case(scale=BF16), Case(scale=replace(BF16, parallel=Parallel(dp_replicate=2)))]
    )[0]:
        assert {gradient.dtype for gradient in trace.gradients.values()} == {torch.float32}
        assert_same(trace, alone, tolerance=2e-2)
