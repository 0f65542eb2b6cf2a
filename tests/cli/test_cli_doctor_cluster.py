"""`armillary doctor --cluster` on real ranks."""

from __future__ import annotations

import contextlib
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from armillary.cli.main import main
from armillary.telemetry.machine.cluster import collectives, storage
from ranks import run_ranks


def examined(folder: str, typed: list[str], *, hosts: int = 1, apart: bool = False) -> Any:
    """What the command prints on each rank, as JSON; ranks take turns on made-up hosts."""
    rank = dist.get_rank()
    host = f"host-{rank % hosts}"
    socket.gethostname = lambda: host
    storage._PATIENCE_SECONDS = 0.5
    place = f"{folder}/{host}" if apart else folder
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["doctor", "--cluster", "--quick", "--json", "--run", place, *typed])
    return code, said.getvalue()


def test_every_axis_the_folder_and_a_checkpoint_are_looked_at(tmp_path: Path) -> None:
    typed = ["debug-qwen3-moe", "--parallel.pp", "2", "--parallel.ep", "2", "--parallel.tp", "1"]
    results = run_ranks(examined, 4, str(tmp_path), typed, hosts=2)
    assert [said for _, said in results[1:]] == ["", "", ""]
    assert {code for code, _ in results} == {0}
    findings = json.loads(results[0][1])["findings"]
    by_name = {each["name"]: each for each in findings}
    assert by_name["ranks"]["values"]["hosts"] == {"host-0": 2, "host-1": 2}
    assert {"versions", "world", "pp", "fsdp", "ep", "disk", "run folder"} <= by_name.keys()
    assert all(each["values"].get("right", True) for each in findings)
    apart = by_name["clocks"]["values"]["offset_seconds"]
    assert abs(apart["host-1"]) < 1.0  # the same clock, seen by two processes
    assert by_name["checkpoint"]["verdict"] == "ok"
    assert by_name["checkpoint"]["values"]["bytes"] == 4 << 20
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_hosts_that_do_not_share_the_run_folder_are_a_failure(tmp_path: Path) -> None:
    results = run_ranks(examined, 2, str(tmp_path), ["debug"], hosts=2, apart=True)
    assert [code for code, _ in results] == [1, 1]
    document = json.loads(results[0][1])
    by_name = {each["name"]: each for each in document["findings"]}
    assert document["verdict"] == "fail"
    assert by_name["run folder"]["values"]["blind_hosts"] == ["host-1"]


def measured(spoil: bool) -> list[tuple[str, bool, float]]:
    """Every operation among two or three ranks; the sums are spoilt on rank 1."""
    if spoil and dist.get_rank() == 1:
        whole = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, group: Any) -> None:
            whole(tensor, group=group)
            tensor[-1] += 1

        collectives.dist.all_reduce = all_reduce  # type: ignore[assignment]
    world: Any = dist.group.WORLD
    members = tuple(range(dist.get_world_size()))
    found = []
    for axis in ("dp_replicate", "fsdp", "ep", "pp"):
        device = torch.device("cpu")
        for each in collectives.measure_axis(axis, world, members, device, 1000):
            found.append((each.operation, each.right, each.bytes_per_second))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_of_every_operation_are_checked(world_size: int) -> None:
    operations = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    for rank in run_ranks(measured, world_size, spoil=False):
        assert [operation for operation, _, _ in rank] == operations
        assert all(right and rate > 0 for _, right, rate in rank)


def test_a_wrong_sum_on_one_rank_is_found() -> None:
    first, second = run_ranks(measured, 2, spoil=True)
    assert [right for _, right, _ in first] == [True] * 5
    assert [right for _, right, _ in second] == [False, True, True, True, True]


@pytest.mark.full
def test_the_command_starts_its_own_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    typed = ["--nproc", "2", "--quick", "--run", str(tmp_path), "--parallel.tp", "2"]
    assert main(["doctor", "--cluster", "debug", *typed]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if " all_gather of " in line] == ["tp"]
    assert lines[-1].startswith("ready to train")


def test_a_mesh_that_does_not_fit_the_ranks_is_wrong_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--cluster", "debug", "--nproc", "2", "--parallel.tp", "3"]) == 2
    assert "parallel.tp = 3" in capsys.readouterr().err


def test_a_recipe_without_cluster_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "debug"]) == 2
    assert "try: armillary doctor --cluster debug" in capsys.readouterr().err
