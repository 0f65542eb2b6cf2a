"""How layers are cut into stages: arithmetic, names and rules, without ranks."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_cases import tiny
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage, schedules

from armillary.foundation.errors import UserError
from armillary.models.decoder import Decoder
from armillary.parallel import Compile, EveryK, Full, Parallel, Scale, Selective
from armillary.parallel.layout import Layouts
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.placement import rank_of_stages
from armillary.parallel.pipeline.rules import split_backward_problems, splits_backward
from armillary.parallel.pipeline.split import layer_costs, plan_of, split_pipeline, stage_plan
from armillary.parallel.pipeline.stage import stage_of


def _loads(costs: list[float], plan: list[range], first: float, last: float) -> list[float]:
    loads = [sum(costs[index] for index in layers) for layers in plan]
    loads[0] += first
    loads[-1] += last
    return loads


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    stages=st.integers(1, 5),
    first=st.integers(0, 9),
    last=st.integers(0, 30),
)
def test_no_other_cut_has_a_cheaper_costliest_stage_nor_is_as_cheap_and_more_even(
    costs: list[int], stages: int, first: int, last: int
) -> None:
    stages = min(stages, len(costs))
    values = [float(cost) for cost in costs]
    plan = stage_plan(values, stages, first=first, last=last)
    assert [index for layers in plan for index in layers] == list(range(len(costs)))
    assert min(map(len, plan)) >= 1

    def score(cut: list[range]) -> tuple[float, float]:
        loads = _loads(values, cut, first, last)
        return max(loads), sum(load * load for load in loads)

    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(
        score([range(a, b) for a, b in itertools.pairwise([0, *cut, len(costs)])]) for cut in cuts
    )
    assert score(plan) == best


def test_an_override_is_taken_as_it_is() -> None:
    assert stage_plan([1.0] * 6, 3, (1, 4, 1)) == [range(1), range(1, 5), range(5, 6)]


def test_a_costly_head_leaves_fewer_layers_to_the_last_stage() -> None:
    model = tiny(vocabulary=2000)
    assert isinstance(model, Decoder)
    costs = layer_costs(model)
    attention = 2 * 16 * (4 + 2) * 4 + 2 * 16 * 64 / 2  # projections; scores of half the row
    assert costs == [attention + 3 * 16 * 24] * 8
    assert [len(layers) for layers in plan_of(model, 2)] == [8 - 1, 1]
    plain = tiny()
    assert isinstance(plain, Decoder)
    assert [len(layers) for layers in plan_of(plain, 4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (Parallel(), (0,)),
        (Parallel(pp=3), (0, 1, 2)),
        (Parallel(pp=2, schedule="LoopedBFS", stages_per_rank=3), (0, 1, 0, 1, 0, 1)),
        (Parallel(pp=3, schedule="DualPipeV"), (0, 1, 2, 2, 1, 0)),
        (Parallel(pp=2, schedule="ZBVZeroBubble"), (0, 1, 1, 0)),
    ],
    ids=str,
)
def test_stages_go_round_the_ranks_or_up_and_down(
    parallel: Parallel, ranks: tuple[int, ...]
) -> None:
    assert rank_of_stages(parallel) == ranks


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0F0,0B0,1F0,1B0\n1F0,1B0\n", "has stage 1 in lines 1, 2"),
        ("0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n", "has cell 0F1 out of its order"),
        ("0F0,0B0\n2F0,2B0\n", "has stages [0, 2] only"),
    ],
)
def test_a_table_that_is_no_pipeline_is_refused(tmp_path: Path, text: str, what: str) -> None:
    table = tmp_path / "own.csv"
    table.write_text(text)
    with pytest.raises(UserError, match=r"own\.csv") as error:
        rank_of_stages(Parallel(pp=2, schedule=str(table)))
    assert what in error.value.problems[0].message


def _parts(parallel: Parallel, rank: int, *, tied: bool) -> tuple[nn.Module, list[nn.Module]]:
    model = tiny(tied=tied)
    mesh = Mesh.imagined(parallel, parallel.pp, rank)
    return model, split_pipeline(model, mesh, Layouts.of(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_stages_have_the_names_of_the_whole_model_and_together_all_of_them(
    schedule: str, tied: bool
) -> None:
    parallel = Parallel(pp=2, schedule=schedule)
    names: list[str] = []
    for rank in range(2):
        model, parts = _parts(parallel, rank, tied=tied)
        for part in parts:
            own = [name for name, _ in part.named_parameters()]
            assert list(part.initializers()) == own  # type: ignore[operator]
            stage = stage_of(part)
            assert ("embedding.weight" in own) == stage.is_first
            assert ("norm.weight" in own) == ("head.weight" in own) == stage.is_last
            names += own
        # The whole model is left as it was: a stage is a copy that shares what it holds.
        whole = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(whole)
    assert len(names) == len(set(names))


def test_without_a_pipeline_the_model_is_its_only_part() -> None:
    model, parts = _parts(Parallel(), 0, tied=True)
    assert parts == [model]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"compile": Compile(enabled=True)}, 1),
        ({"activation_checkpoint": Selective()}, 1),
        ({"activation_checkpoint": Full()}, 0),
        ({"activation_checkpoint": EveryK()}, 0),
    ],
    ids=str,
)
def test_a_split_backward_pass_refuses_what_forgets_after_the_first_time(
    changes: dict[str, Any], refused: int
) -> None:
    scale = replace(Scale(parallel=Parallel(pp=2, schedule="ZBVZeroBubble")), **changes)
    assert len(split_backward_problems(scale, 8)) == refused
    whole = replace(scale, parallel=Parallel(pp=2, schedule="Interleaved1F1B"))
    assert split_backward_problems(whole, 8) == []


def test_a_table_splits_the_backward_pass_if_one_of_its_cells_does(tmp_path: Path) -> None:
    for name, last, splits in (("whole", "1B0", False), ("split", "1I0,1W0", True)):
        table = tmp_path / f"{name}.csv"
        table.write_text(f"0F0,,,0B0\n,1F0,{last}\n")
        assert splits_backward(Parallel(pp=2, schedule=str(table))) == splits


def test_the_parts_of_torch_that_are_not_public_are_there() -> None:
    """Seen with torch 2.13; `pipeline/schedules.py` is the only place that uses them."""
    what = f"torch {torch.__version__}"
    runtime = schedules._PipelineScheduleRuntime
    assert "format" in inspect.signature(runtime._load_csv).parameters, what
    assert "scale_grads" in inspect.signature(schedules.PipelineScheduleMulti).parameters, what
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        assert "return_outputs" in inspect.signature(kind.step).parameters, what
    stage = inspect.signature(PipelineStage).parameters
    assert {"input_args", "output_args", "group"} <= set(stage), what
    once = inspect.signature(PipelineStage.backward_weight_one_chunk).parameters
    assert list(once) == ["self", "bwd_chunk_id", "last_backward"], what
    for name in ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed"):
        assert hasattr(FSDPParam, name), what
