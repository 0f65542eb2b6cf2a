"""Machines of a run, and where their ranks meet."""

from __future__ import annotations

import pytest

from armillary.launch.place import Place


def test_ranks_are_counted_over_all_machines() -> None:
    place = Place(nodes=3, node=2, meeting="first:29500")
    ranks = [place.environment(local, 4) for local in range(4)]
    assert [each["RANK"] for each in ranks] == ["8", "9", "10", "11"]
    assert {each["WORLD_SIZE"] for each in ranks} == {"12"}
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks} == {("first", "29500")}
    assert "GLOO_SOCKET_IFNAME" not in ranks[0]  # the loopback would not reach the others


def test_ranks_of_one_machine_meet_on_its_loopback() -> None:
    environment = Place().settled().environment(0, 2)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(environment["MASTER_PORT"]) < 2**16


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    assert Place(nodes=2, meeting="[fd00::1]:29500").environment(0, 1)["MASTER_ADDR"] == "fd00::1"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Place(nodes=0), "--nodes 0"),
        (Place(nodes=2, node=2, meeting="a:1"), "--node-rank 2"),
        (Place(nodes=2), "without --meet"),
        (Place(meeting="host"), "--meet host is no address"),
        (Place(meeting="host:99999"), "--meet host:99999"),
        (Place(meeting="host:x"), "--meet host:x"),
    ],
)
def test_places_where_ranks_cannot_meet_are_refused(place: Place, said: str) -> None:
    assert said in place.problems()[0].message


def test_a_place_that_works_has_no_problems() -> None:
    assert Place().problems() == Place(nodes=2, node=1, meeting="h:29500").problems() == []
