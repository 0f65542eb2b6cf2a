"""What is odd among many ranks, from made-up facts: what is said, and what is advised."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from armillary.telemetry.machine.cluster import storage
from armillary.telemetry.machine.cluster.clocks import Offset, clocks_finding, offset_of
from armillary.telemetry.machine.cluster.collectives import Exchange, axis_findings
from armillary.telemetry.machine.cluster.facts import RankFacts, compare
from armillary.telemetry.machine.finding import Finding

ALIKE = RankFacts(
    host="a",
    device="H100",
    versions={"torch": "2.13.0", "numpy": "2.4"},
    variables={"NCCL_DEBUG": "WARN"},
    open_files=65_536,
    shared_bytes=2**33,
    cores=8,
    flops=1e14,
)


def looked_at(*changes: dict[str, Any]) -> dict[str, Finding]:
    """Four ranks on two hosts, the last ones changed."""
    facts = [dataclasses.replace(ALIKE, host=host) for host in "aabb"]
    for index, change in enumerate(reversed(changes), start=1):
        facts[-index] = dataclasses.replace(facts[-index], **change)
    return {each.name: each for each in compare(facts)}


def test_ranks_that_are_alike_are_fine() -> None:
    found = looked_at()
    assert {each.verdict for each in found.values()} == {"ok"}
    assert found["ranks"].text == "4 ranks on 2 hosts: 4 x H100"


@pytest.mark.parametrize(
    ("change", "name", "verdict", "said"),
    [
        ({"versions": {"torch": "2.12.0", "numpy": "2.4"}}, "versions", "fail", "2.12.0 on rank 3"),
        (
            {"versions": {"torch": "2.13.0"}},
            "versions",
            "fail",
            "numpy differs: none on rank 3 (b)",
        ),
        ({"variables": {}}, "variables", "warn", "NCCL_DEBUG: none on rank 3 (b), WARN on the oth"),
        ({"device": "A100"}, "ranks", "warn", "3 x H100 and 1 x A100"),
        ({"host": "a"}, "ranks", "warn", "4 ranks on 2 hosts"),
        ({"open_files": 1024}, "open files", "warn", "1024 at least (rank 3, b), 1048 wanted"),
        ({"shared_bytes": 2**26}, "/dev/shm", "warn", "64.0 MiB free at least (rank 3, b)"),
        ({"locked_bytes": 65_536}, "locked", "warn", "rank 3 (b): limited"),
        ({"flops": 7e13}, "products", "warn", "70 TFLOP/s to 100 TFLOP/s"),
    ],
)
def test_the_odd_one_out_is_named_with_what_to_do(
    change: dict[str, Any], name: str, verdict: str, said: str
) -> None:
    found = looked_at(change)
    assert found[name].verdict == verdict
    assert said in found[name].text
    assert found[name].advice
    assert [each.name for each in found.values() if each.verdict != "ok"] == [name]


def test_an_answer_says_how_far_a_clock_is_ahead_and_how_sure_that_is() -> None:
    offset = offset_of(asked=10.0, there=13.0, answered=10.5)
    assert (offset.seconds, offset.error) == (2.75, 0.25)


def test_a_clock_is_off_only_where_the_way_there_and_back_does_not_explain_it() -> None:
    hosts = ["a", "b", "c"]
    fine = clocks_finding({1: Offset(0.01, 0.001), 2: Offset(-0.3, 0.25)}, hosts)
    assert fine.verdict == "ok"
    off = clocks_finding({1: Offset(0.01, 0.001), 2: Offset(-0.4, 0.25)}, hosts)
    assert (off.verdict, "clock of c" in off.advice) == ("warn", True)
    assert clocks_finding({}, ["a"]).verdict == "ok"


def exchanged(seconds: float, *members: int, **more: Any) -> Exchange:
    values = {"operation": "all_reduce", "bytes": 1_000, "latency_seconds": 1e-5} | more
    return Exchange(members=members, seconds=seconds, **values)


@pytest.mark.parametrize(
    ("operation", "members", "rate"),
    [
        ("all_reduce", (0, 1), 1_000.0),  # each of 2 ranks sends half and receives half, twice
        ("all_reduce", (0, 1, 2, 3), 1_500.0),
        ("all_gather", (0, 1, 2, 3), 750.0),
        ("all_to_all", (0, 1), 500.0),
        ("send", (0, 1), 1_000.0),
    ],
)
def test_bandwidth_is_that_of_the_bus(
    operation: str, members: tuple[int, ...], rate: float
) -> None:
    assert exchanged(1.0, *members, operation=operation).bytes_per_second == rate


def test_the_slowest_group_is_named_once_it_is_far_behind() -> None:
    hosts = ["a", "a", "b", "b", "c", "c"]
    groups = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    seconds = [1.0, 1.1, 1.0, 1.0, 1.0, 2.5]
    seen = [[exchanged(s, *group)] for s, group in zip(seconds, groups, strict=True)]
    (found,) = axis_findings("dp_replicate", seen, hosts, ())
    assert found.verdict == "warn"
    assert found.advice == "ranks 4 5 (c) is far slower than other groups: look there"
    assert found.values["bus_bytes_per_second"] == 400.0
    (fine,) = axis_findings("dp_replicate", seen[:4], hosts, ())
    assert fine.verdict == "ok"


def test_wrong_results_keep_a_run_from_starting() -> None:
    seen = [[exchanged(1.0, 0, 1)], [exchanged(1.0, 0, 1, right=False)]]
    (found,) = axis_findings("dp_replicate", seen, ["a", "b"], ())
    assert (found.verdict, found.values["right"]) == ("fail", False)
    assert "ranks 0 1 (a, b)" in found.advice


def test_tensor_parallelism_beyond_one_machine_is_told() -> None:
    seen = [[exchanged(1.0, 0, 1), exchanged(1.0, 0, 1)]] * 2
    across = axis_findings("tp", seen, ["a", "b"], ("tp",))
    within = axis_findings("tp", seen, ["a", "a"], ("tp",))
    assert [each.verdict for each in across + within] == ["warn", "warn", "ok", "ok"]


def test_a_folder_that_is_not_shared_or_not_writable_is_a_failure(tmp_path: Path) -> None:
    assert storage.shared_finding(tmp_path, {0: 0.1, 1: 0.3}, ["a", "b"]).verdict == "ok"
    blind = storage.shared_finding(tmp_path, {0: 0.1, 1: None}, ["a", "b"])
    assert (blind.verdict, "not that of b" in blind.text) == ("fail", True)
    (tmp_path / "file").touch()
    rates = {0: storage.write_rate(tmp_path, 1 << 20), 1: storage.write_rate(tmp_path / "file", 1)}
    refused = storage.disk_finding(tmp_path, rates, ["a", "b"])
    assert (refused.verdict, list(refused.values["refused"])) == ("fail", ["b"])
    slow = storage.disk_finding(tmp_path, {0: 1e9, 1: 1e6}, ["a", "b"])
    assert (slow.verdict, "slow on b" in slow.advice) == ("warn", True)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]
