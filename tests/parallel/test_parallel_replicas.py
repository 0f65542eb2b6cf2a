"""Links between groups, what travels over them, and outer steps; each rank is a group here."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.parallel.replicas import DiLoCo, Replicas
from armillary.parallel.replicas.config import address
from armillary.parallel.replicas.heal import receive_facts, receive_tensors, send_state
from armillary.parallel.replicas.lighthouse import Lighthouse, Member, Quorum, group_name, parts_of
from armillary.parallel.replicas.link import Link, LinkBroken
from armillary.parallel.replicas.outer import build_outer
from armillary.parallel.replicas.sums import sum_numbers, sum_step
from ranks import run_ranks

HOST = "127.0.0.1"

# Not imported here: whoever imports torchft first decides how much its servers say.
needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not there")


class Stub(nn.Linear):
    """As much of a `ParallelModel` as sums and outer steps look at."""

    counts: Tensor | None = None
    whole = SimpleNamespace(frozen=frozenset())

    def take_counts(self) -> Tensor | None:
        """See `ParallelModel`."""
        counts, self.counts = self.counts, None
        return counts

    def add_counts(self, counts: Tensor) -> None:
        """See `ParallelModel`."""
        self.counts = counts

    def whole_view(self, name: str, tensor: Tensor) -> Tensor:
        """See `ParallelModel`."""
        return tensor


def linked(*, number: int = 1, timeout: float = 20.0) -> tuple[Link, Any]:
    """A link between all ranks, and the store that has to live as long."""
    store: Any = None
    port = [0]
    if dist.get_rank() == 0:
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    link = Link(HOST, timeout)
    names = tuple(group_name(group, "same") for group in range(dist.get_world_size()))
    quorum = Quorum(
        number=number,
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        heals_from=None,
        heals=(),
        store=f"{HOST}:{port[0]}",
        names=names,
    )
    link.connect(quorum, rank=0)
    return link, store


def sums() -> None:
    link, store = linked()
    rank = dist.get_rank()
    assert sum_numbers(link, (1, 10 * rank)) == (3, 30)
    tensors = [torch.full((3, 5), float(rank)), torch.tensor(rank), torch.ones(2, 0)]
    tensors.append(torch.full((4,), rank, dtype=torch.bfloat16).view(2, 2).t())
    link.sum_(tensors)
    assert [float(each.sum()) for each in tensors] == [45.0, 3.0, 0.0, 12.0]

    model = Stub(2, 3)
    model.counts = torch.tensor([rank, 1])
    if rank == 1:  # the others had no row that reaches the weight
        model.weight.grad = torch.ones(3, 2)
    loss = torch.tensor(float(rank), dtype=torch.float64)
    sum_step(link, model, [loss])  # type: ignore[arg-type]
    assert model.weight.grad is not None and float(model.weight.grad.sum()) == 6.0
    assert model.bias.grad is None, "no group had a gradient of it"
    assert float(loss) == 3.0
    assert model.counts.tolist() == [3, 3]
    dist.barrier()
    del store


def test_gradients_losses_counts_and_numbers_add_up_over_groups() -> None:
    run_ranks(sums, 3)


def odd_bits() -> list[bytes]:
    link, store = linked()
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(100_001) * 10 ** torch.randn(100_001)
    link.sum_([tensor])
    dist.barrier()
    del store
    return [tensor.numpy().tobytes()]


def test_a_sum_has_the_same_bits_in_every_group() -> None:
    first, *others = run_ranks(odd_bits, 3)
    assert all(other == first for other in others)


def heal() -> None:
    link, store = linked()
    rank = dist.get_rank()
    mine = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "none": torch.zeros(0, 4)}
    if rank == 0:
        send_state(link, 1, {"step": 5}, mine)
        with pytest.raises(LinkBroken):
            send_state(link, 1, {}, mine)
    else:
        here = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
        here["a"] = torch.zeros(3, 2).t()  # no contiguous memory
        announced = receive_facts(link, 0)
        assert announced.facts == {"step": 5}
        receive_tensors(link, 0, announced, here)
        assert all(torch.equal(here[name], mine[name]) for name in mine)
        other = {**here, "b": torch.zeros(1), "c": mine["b"]}
        announced = receive_facts(link, 0)
        with pytest.raises(LinkBroken, match="other tensors: b, c"):
            receive_tensors(link, 0, announced, other)
        link.close()
    dist.barrier()
    del store


def test_a_state_arrives_bit_for_bit_and_one_of_other_tensors_is_refused() -> None:
    run_ranks(heal, 2)


def lose(when: str) -> None:
    link, store = linked(timeout=2.0)
    rank = dist.get_rank()
    tensor = torch.ones(1000)
    if rank == 1 and when == "gone":
        link.close()
    if rank != 1:
        with pytest.raises(LinkBroken):
            link.sum_([tensor])
        link.close()
    dist.barrier()
    again, other = linked(number=2)
    tensor = torch.ones(1000)
    again.sum_([tensor])
    assert float(tensor.sum()) == 3000.0
    dist.barrier()
    del store, other


@pytest.mark.parametrize("when", ["gone", "silent"])
def test_a_peer_that_is_gone_or_silent_breaks_the_link_and_a_new_one_holds(when: str) -> None:
    run_ranks(lose, 3, when)


def outer_steps() -> dict[str, Tensor]:
    """Three rounds of two groups, and a third that came late to the last."""
    link, store = linked()
    torch.manual_seed(0)
    model = Stub(3, 2)
    replicas = Replicas(lighthouse="h:1", mode=DiLoCo(lr=0.5, momentum=0.8))
    outer = build_outer(replicas, model)  # type: ignore[arg-type]
    oracle = Stub(3, 2)
    oracle.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(oracle.parameters(), lr=0.5, momentum=0.8, nesterov=True)
    for number in range(3):
        ways = [torch.full((2, 3), 0.1 * (group + 1) * (number + 1)) for group in range(3)]
        with torch.no_grad():
            model.weight.sub_(ways[dist.get_rank()])
        outer.apply(outer.mean(link, float(dist.get_rank() < 2)))
        oracle.weight.grad, oracle.bias.grad = (ways[0] + ways[1]) / 2, torch.zeros(2)
        sgd.step()
        torch.testing.assert_close(model.weight, oracle.weight)
    assert torch.equal(outer.state()["anchor.weight"], model.weight)
    dist.barrier()
    del store
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_diloco_is_nesterov_sgd_on_the_mean_way_of_those_that_took_part() -> None:
    first, *others = run_ranks(outer_steps, 3)
    assert all(torch.equal(first["weight"], other["weight"]) for other in others)


def mean_of_two() -> float:
    link, store = linked()
    model = Stub(1, 1)
    with torch.no_grad():
        model.weight.fill_(float(dist.get_rank() + 1))
    outer = build_outer(Replicas(), model)  # type: ignore[arg-type]
    assert outer.state() == {}
    outer.apply(outer.mean(link, 1.0))
    dist.barrier()
    del store
    return float(model.weight)


def test_local_sgd_is_the_mean_of_the_weights() -> None:
    assert run_ranks(mean_of_two, 2) == [1.5, 1.5]


def mean_of_what_is_trained(mode: DiLoCo | None) -> tuple[float, float]:
    """Weight and bias of two groups, of which the bias is frozen."""
    link, store = linked()
    model = Stub(1, 1)
    model.whole = SimpleNamespace(frozen=frozenset({"bias"}))
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 5.0)
    replicas = Replicas() if mode is None else Replicas(lighthouse="h:1", mode=mode)
    outer = build_outer(replicas, model)  # type: ignore[arg-type]
    assert not any(name.endswith(".bias") for name in outer.state())
    with torch.no_grad():
        model.weight.add_(float(dist.get_rank()))
        model.bias.add_(float(dist.get_rank()))  # what nobody does: a mean would show
    means = outer.mean(link, 1.0)
    assert [each.shape for each in means] == [model.weight.shape]
    outer.apply(means)
    dist.barrier()
    del store
    return float(model.weight), float(model.bias)


@pytest.mark.parametrize("mode", [None, DiLoCo(lr=1.0, momentum=0.0)], ids=("local", "diloco"))
def test_frozen_weights_are_neither_sent_nor_changed_nor_remembered(mode: DiLoCo | None) -> None:
    assert run_ranks(mean_of_what_is_trained, 2, mode) == [(1.5, 5.0), (1.5, 6.0)]


def only(make: Callable[[], str]) -> str:
    return make()


def member(lighthouse: Lighthouse, group: int, identity: str = "same") -> Member:
    """A group of one rank."""
    return Member(
        group_name(group, identity),
        lighthouse=f"{HOST}:{lighthouse.port}",
        host=HOST,
        rank=0,
        size=1,
        from_main=only,
    )


@needs_torchft
def test_a_lighthouse_tells_who_is_there_and_who_is_behind() -> None:
    lighthouse = Lighthouse(f"{HOST}:0", least=2, join_seconds=5, silent_seconds=1)
    first, second = member(lighthouse, 0), member(lighthouse, 1)
    try:
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(second.meet, 5, failures=0, seconds=20)
            behind = first.meet(3, failures=0, seconds=20)
            ahead = waiting.result()
            assert (behind.rank, behind.size, behind.heals_from, behind.heals) == (0, 2, 1, ())
            assert (ahead.rank, ahead.size, ahead.heals_from, ahead.heals) == (1, 2, None, (0,))
            assert [parts_of(name) for name in ahead.names] == [(0, "same"), (1, "same")]
            waiting = pool.submit(second.meet, 5, failures=1, seconds=20)
            assert first.meet(5, failures=0, seconds=20).number > behind.number
            waiting.result()
    finally:
        for one in (first, second, lighthouse):
            one.close()


@needs_torchft
def test_all_ranks_of_a_group_heal_from_the_peer_that_rank_0_was_told_of() -> None:
    lighthouse = Lighthouse(f"{HOST}:0", least=3, join_seconds=5, silent_seconds=1)
    members = {}
    for group in range(3):
        told: list[str] = []

        def from_main(serve: Callable[[], str], told: list[str] = told) -> str:
            if not told:
                told.append(serve())
            return told[0]

        for rank in range(2):
            members[group, rank] = Member(
                group_name(group, "same"),
                lighthouse=f"{HOST}:{lighthouse.port}",
                host=HOST,
                rank=rank,
                size=2,
                from_main=from_main,
            )
    try:
        with ThreadPoolExecutor(len(members)) as pool:
            progress = [5, 5, 3]
            met = {
                (group, rank): pool.submit(one.meet, progress[group], failures=0, seconds=20)
                for (group, rank), one in members.items()
            }
            seen = {place: each.result() for place, each in met.items()}
        assert seen[2, 0].heals_from != seen[2, 1].heals_from, "as torchft deals peers to ranks"
        for group in range(3):
            whose = seen[group, 0].whose_state(3)
            agreed = seen[group, 1].healed_as(whose)
            assert (agreed.heals_from, agreed.heals) == (
                seen[group, 0].heals_from,
                seen[group, 0].heals,
            )
    finally:
        for each in members.values():
            each.close()
        lighthouse.close()


@contextlib.contextmanager
def lighthouse_at(listen: str) -> Iterator[str]:
    """One in a process of its own, which can die; where it listens."""
    command = [sys.executable, "-m", "armillary", "lighthouse", "--listen", listen]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[-1]
        finally:
            process.kill()


@pytest.mark.full
@needs_torchft
def test_members_go_on_with_a_lighthouse_that_came_back() -> None:
    with lighthouse_at(f"{HOST}:0") as address:
        one = Member(
            group_name(0, "same"), lighthouse=address, host=HOST, rank=0, size=1, from_main=only
        )
        one.meet(1, failures=0, seconds=20)
    with pytest.raises((RuntimeError, TimeoutError)):
        one.meet(3, failures=0, seconds=1)
    with lighthouse_at(address):
        assert one.meet(3, failures=0, seconds=20).size == 1
    one.close()


def listening() -> list[str]:
    """Where this process listens, as the kernel writes addresses."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(descriptor.readlink()))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]


@needs_torchft
def test_nobody_begins_before_enough_groups_are_there() -> None:
    lighthouse = Lighthouse(f"{HOST}:0", least=2, join_seconds=5, silent_seconds=1)
    one = member(lighthouse, 0)
    try:
        with pytest.raises(TimeoutError):
            one.meet(1, failures=0, seconds=0.5)
    finally:
        one.close()
        lighthouse.close()


@needs_torchft
def test_what_listens_listens_at_the_address_that_was_named() -> None:
    lighthouse = Lighthouse("127.0.0.1:0", least=1, join_seconds=5, silent_seconds=1)
    one = member(lighthouse, 0)
    try:
        own = listening()
        assert len(own) >= 3, "lighthouse, member and store"
        assert {place.partition(":")[0] for place in own} == {"0100007F"}
    finally:
        one.close()
        lighthouse.close()


def test_addresses_are_read_as_they_are_written() -> None:
    assert address("host:1") == ("host", 1)
    assert address("[::1]:29510") == ("::1", 29510)
    assert [address(text) for text in ("host", "host:", ":1", "h:0", "h:70000", "http://h:1")] == [
        None
    ] * 6


def test_this_torch_has_the_private_parts_that_links_are_made_of() -> None:
    names = {"_Options", "create_device"}
    assert names <= set(dir(dist.ProcessGroupGloo)), f"torch {torch.__version__}"
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    assert {"_devices", "_timeout"} <= set(dir(options)), f"torch {torch.__version__}"
