"""Meetings of replica groups that do not come about at once, with stand-ins for who is met."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from armillary.checkpoint.ranks import Ranks
from armillary.foundation.errors import RunError
from armillary.parallel.replicas import LocalSGD, Replicas
from armillary.parallel.replicas.lighthouse import Quorum, group_name
from armillary.parallel.replicas.link import LinkBroken
from armillary.recipe.recipe import Recipe
from armillary.training import replicated_meeting
from armillary.training.agreed_stop import AgreedStop
from armillary.training.replicated import Rounds
from armillary.training.replicated_meeting import Meeting
from armillary.training.state import Position

SILENT: Any = SimpleNamespace(emit=lambda *_, **__: None, warn=lambda *_, **__: None)


class Outer:
    """Notes what it was asked for."""

    def __init__(self) -> None:
        self.weights: list[float] = []

    def mean(self, link: object, weight: float) -> list[Any]:
        """See `Outer`."""
        self.weights.append(weight)
        return []

    def apply(self, means: list[Any]) -> None:
        """See `Outer`."""


def assembly(**replicas: Any) -> Any:
    """As much of one as meetings look at."""
    there = Replicas(lighthouse="h:1", groups=2, **replicas)
    return SimpleNamespace(
        recipe=Recipe(replicas=there),
        mesh=SimpleNamespace(axes={}),
        data=SimpleNamespace(training=SimpleNamespace(fingerprint="same")),
        outer=Outer(),
        total_steps=10,
    )


def stop() -> AgreedStop:
    """One that nobody asks for."""
    request: Any = SimpleNamespace(requested=False, signal_name=None)
    return AgreedStop(request, Ranks())


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Meeting]:
    """Makes a meeting whose lighthouse gives answers, made of the names of two groups that fit."""
    monkeypatch.setattr(replicated_meeting, "_PAUSE_SECONDS", 0.001)

    def make(answers: Callable[[list[str]], Any], **replicas: Any) -> Meeting:
        made = Meeting(assembly(**replicas), stop(), SILENT)
        both = [group_name(group, made._identity) for group in (0, 1)]

        class Lighthouse:
            """In the place of a `Member`."""

            def __init__(self, *_: object, **__: object) -> None: ...

            def meet(self, *_: object, **__: object) -> Quorum:
                """See `Member`."""
                answer = answers(both)
                if isinstance(answer, Exception):
                    raise answer
                names = tuple(answer)
                return Quorum(
                    number=1,
                    rank=0,
                    size=len(names),
                    heals_from=None,
                    heals=(),
                    store="h:1",
                    names=names,
                )

        monkeypatch.setattr(replicated_meeting, "Member", Lighthouse)
        monkeypatch.setattr(made.link, "connect", lambda *_, **__: None)
        return made

    return make


def test_a_group_waits_for_a_lighthouse_that_is_not_there_yet(meeting: Any) -> None:
    answers = [RuntimeError("failed to connect"), TimeoutError(), RuntimeError("")]
    made = meeting(lambda both: answers.pop() if answers else both)
    assert made.meet(Position()) is None
    assert made.share.size == 2


def test_a_lighthouse_that_refuses_to_be_reached_by_rank_0_is_asked_again(
    meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = meeting(lambda both: both)
    there: Any = vars(replicated_meeting)["Member"]
    tries = []

    def joined(*_: object, from_main: Callable[[Callable[[], str]], str], **__: object) -> Any:
        def serve() -> str:
            tries.append(1)
            if len(tries) < 3:
                raise RuntimeError("failed to connect to the lighthouse")
            return ""

        from_main(serve)
        return there()

    monkeypatch.setattr(replicated_meeting, "Member", joined)
    assert made.meet(Position()) is None
    assert len(tries) == 3


def test_a_group_that_was_just_killed_may_count_as_there_for_a_while(meeting: Any) -> None:
    looks = iter(range(5))
    made = meeting(lambda both: both if next(looks, None) is None else [*both, both[1]])
    assert made.meet(Position()) is None
    assert made.share.size == 2


@pytest.mark.parametrize("what", ["strangers", "too many"])
def test_a_group_that_comes_to_others_that_it_does_not_fit_leaves(what: str, meeting: Any) -> None:
    stranger = group_name(1, "other")
    made = meeting(lambda both: [*both, stranger if what == "strangers" else both[1]])
    with pytest.raises(RunError, match=r"trains something else|3 groups are at this lighthouse"):
        made.meet(Position())


@pytest.mark.parametrize("why", ["no lighthouse", "no links"])
def test_a_group_gives_up_after_its_time(
    why: str, meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LinkBroken("connection refused")

    refused = RuntimeError("connection refused")
    made = meeting(lambda both: refused if why == "no lighthouse" else both, meeting_seconds=0.05)
    monkeypatch.setattr(made.link, "connect", refuse)
    with pytest.raises(RunError, match=r"no group was met .*: connection refused"):
        made.meet(Position())


def test_a_round_whose_groups_are_all_lost_is_ended_by_one_that_has_their_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = assembly(mode=LocalSGD(every=5))
    rounds = Rounds(trained, stop(), SILENT)
    position = Position(step=5, tokens_total=70)
    facts = {"due": True, "tokens_before": 30}
    monkeypatch.setattr(rounds._meeting, "meet", lambda *_, **__: facts)
    rounds._meet(position)
    assert trained.outer.weights == [1]
    assert position.tokens_total == 70
