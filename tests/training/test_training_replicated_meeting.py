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
def meeting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Meeting, list[str]]]:
    """Makes a meeting whose lighthouse gives these answers, and the names of groups that fit."""
    monkeypatch.setattr(replicated_meeting, "_PAUSE_SECONDS", 0.001)

    def make(answers: Callable[[Meeting], Any], **replicas: Any) -> tuple[Meeting, list[str]]:
        made = Meeting(assembly(**replicas), stop(), SILENT)

        class Lighthouse:
            """In the place of a `Member`."""

            def __init__(self, *_: object, **__: object) -> None: ...

            def meet(self, *_: object, **__: object) -> Quorum:
                """See `Member`."""
                answer = answers(made)
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
        return made, [group_name(group, made._identity) for group in (0, 1)]

    return make


def test_a_group_waits_for_a_lighthouse_that_is_not_there_yet(meeting: Any) -> None:
    answers = [RuntimeError("failed to connect"), TimeoutError(), RuntimeError("")]
    made, names = meeting(lambda _: answers.pop() if answers else names)
    assert made.meet(Position()) is None
    assert made.share.size == 2


def test_a_lighthouse_that_refuses_to_be_reached_by_rank_0_is_asked_again(
    meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, names = meeting(lambda _: names)
    there, tries = replicated_meeting.Member, []

    def joined(*_: object, from_main: Callable[[Callable[[], str]], str], **__: object) -> Any:
        def serve() -> str:
            tries.append(1)
            if len(tries) < 3:
                raise RuntimeError("failed to connect to the lighthouse")
            return ""

        from_main(serve)
        return there("")  # type: ignore[call-arg]

    monkeypatch.setattr(replicated_meeting, "Member", joined)
    assert made.meet(Position()) is None
    assert len(tries) == 3


def test_a_group_that_was_just_killed_may_count_as_there_for_a_while(meeting: Any) -> None:
    ghosts = [group_name(1, "") for _ in range(5)]

    def answers(made: Meeting) -> list[str]:
        ghost = [group_name(1, made._identity)] if ghosts and ghosts.pop() else []
        return [*names, *ghost]

    made, names = meeting(answers)
    assert made.meet(Position()) is None
    assert made.share.size == 2


@pytest.mark.parametrize("what", ["strangers", "too many"])
def test_a_group_that_comes_to_others_that_it_does_not_fit_leaves(what: str, meeting: Any) -> None:
    further = {"strangers": group_name(1, "other"), "too many": group_name(1, "")}[what]
    made, names = meeting(lambda made: [*names, further.replace("::", f":{made._identity}:")])
    with pytest.raises(RunError, match="trains something else|3 groups are at this lighthouse"):
        made.meet(Position())


@pytest.mark.parametrize("why", ["no lighthouse", "no links"])
def test_a_group_gives_up_after_its_time(
    why: str, meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LinkBroken("connection refused")

    refused = RuntimeError("connection refused")
    made, names = meeting(
        lambda _: refused if why == "no lighthouse" else names, meeting_seconds=0.05
    )
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
