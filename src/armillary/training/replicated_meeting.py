"""How replica groups find each other, and come to stand in the same place.

Groups tell how far they are; one that is behind gets the state of one that is not, rank by rank.
So groups that disagree whether a step was whole, one having finished it before the other was lost,
agree again when they meet. Each rank of a group has a link to the ranks of the same number in the
others, as all have the same mesh; whether an exchange succeeded is agreed within the group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from armillary.checkpoint import rng
from armillary.checkpoint.ranks import Failure
from armillary.checkpoint.state import State, fill_training, gather_state
from armillary.checkpoint.tensors import flatten
from armillary.foundation.errors import Problem, RunError
from armillary.foundation.progress import mark
from armillary.foundation.tell import seen_by_every_rank
from armillary.parallel.layout import local_tensor
from armillary.parallel.replicas import Replicas
from armillary.parallel.replicas.heal import receive_facts, receive_tensors, send_state
from armillary.parallel.replicas.lighthouse import Member, Quorum, group_name, parts_of
from armillary.parallel.replicas.link import Link, LinkBroken
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.telemetry.events import EventLog
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly
from armillary.training.state import Position
from armillary.training.step_shape import WHOLE, Share

_ASK_SECONDS = 10.0
"""After which a wait for others looks up, whether this group was asked to stop."""
_PAUSE_SECONDS = 0.3
"""Between attempts where nobody is found at once."""
_CROWDED_LOOKS = 60
"""At too many groups in a row, each after a pause: one that was just killed may count as there."""

T = TypeVar("T")


class Meeting:
    """This group among those that train together. Every rank of it makes one and calls it alike.

    Args:
        assembly: what is trained.
        stop: of this group.
        log: told who is there, and what broke off.
        facts: what a group that is behind is told beside the position.
    """

    def __init__(
        self,
        assembly: Assembly,
        stop: AgreedStop,
        log: EventLog,
        *,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.share = WHOLE
        """Of the groups that met last."""
        self._assembly, self._stop, self._log, self._facts = assembly, stop, log, facts
        self._ranks = stop.ranks
        self._replicas: Replicas = assembly.recipe.replicas
        self._identity = _identity(assembly)
        self.link = Link(self._replicas.host, self._replicas.timeout_seconds)
        self._member: Member | None = None
        self._names: tuple[str, ...] = ()
        self._failures = 0
        self._crowded = 0
        self._why = ""  # what kept this group from meeting the others

    def close(self) -> None:
        """Leaves the others."""
        self.link.close()
        if self._member is not None:
            self._member.close()
        self._member = None

    def meet(self, position: Position, *, due: bool = False) -> dict[str, Any] | None:
        """Returns once all groups that are there are connected and in the same state.

        Args:
            position: after the last step; moved where this group was behind.
            due: whether this group has yet to end the step in some way, together with the others:
                one that has not is ahead of it.

        Returns:
            The facts of another group, where the state is now that group's; else None.

        Raises:
            Stopped: some rank was asked to stop.
            RunError: nobody was met in time; the others train something else; or the group that
                sent its state was lost, and this one's is of no use any more.
        """
        deadline = time.monotonic() + self._replicas.meeting_seconds
        while True:
            mark("meeting the other groups")  # how long that may take is decided here
            asked = time.monotonic()
            quorum = self._ask(2 * position.step + (not due), late=asked > deadline)
            if quorum is None or not self._fits(quorum):
                # At once after a long wait: to the lighthouse this group is still there.
                time.sleep(max(0.0, asked + _PAUSE_SECONDS - time.monotonic()))
                continue
            facts, why = self._join(quorum, position)
            if why is None:
                self._failures, self._why = 0, ""
                self._note(quorum, position)
                return facts
            self.break_off(why, position)

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """Does what needs the other groups: the result, and what went wrong, on any rank here."""
        result, why = None, ""
        try:
            result = work()
        except LinkBroken as error:
            why = str(error) or "no reason given"
        failed, _ = self._ranks.sum_and_any(int(bool(why)), flag=False)
        return result, (why or "a peer of another rank was lost") if failed else None

    def break_off(self, why: str, position: Position) -> None:
        """After an exchange that failed: peers that wait shall see it, and new links be made."""
        self.link.close()
        self._failures += 1
        self._why = why
        self._log.warn(
            f"an exchange with other groups broke off in step {position.step + 1}: {why}",
            where="replicas",
            hint="what was lost is done again with the groups that are there",
            step=position.step,
        )

    # Who is there.

    def _ask(self, progress: int, *, late: bool) -> Quorum | None:
        """A quorum, the same for all ranks, or None where none was found in a while."""
        quorum, groups = None, self._replicas.groups
        try:
            quorum = self._joined().meet(progress, failures=self._failures, seconds=_ASK_SECONDS)
        except (TimeoutError, RuntimeError, Failure) as error:
            self._why = str(error).partition("\n")[0]
        # A group heals from one peer: peers in mid-round hold different weights.
        tells = quorum is not None and self._ranks.rank == 0
        whose = quorum.whose_state(groups) if quorum and tells else [0] * (groups + 1)
        missing, over, *whose = self._stop.sums((int(quorum is None), int(late), *whose))
        if over:
            with seen_by_every_rank():
                raise RunError(
                    Problem(
                        f"no group was met at the lighthouse {self._replicas.lighthouse}:"
                        f" {self._why}",
                        allowed=f"an answer within {self._replicas.meeting_seconds:g} s",
                        fix="armillary lighthouse, and the same command again: it goes on",
                    )
                )
        return None if missing or quorum is None else quorum.healed_as(whose)

    def _joined(self) -> Member:
        if self._member is None:
            replicas = self._replicas
            self._member = Member(
                group_name(replicas.group, self._identity),
                lighthouse=replicas.lighthouse,
                host=replicas.host,
                rank=self._ranks.rank,
                size=self._ranks.size,
                from_main=self._ranks.on_main,
            )
        return self._member

    def _fits(self, quorum: Quorum) -> bool:
        """Whether all train the same, as so many groups; else those leave that came last."""
        known = map(parts_of, quorum.names)
        strangers = [number for number, identity in known if identity != self._identity]
        if not strangers and quorum.size <= self._replicas.groups:
            self._crowded = 0
            return True
        self._crowded += 1
        may_pass = not strangers and self._crowded < _CROWDED_LOOKS
        if not (self._names or may_pass):
            what = f"{quorum.size} groups are at this lighthouse"
            if strangers:
                what = f"group {strangers[0]} at this lighthouse trains something else"
            with seen_by_every_rank():
                raise RunError(
                    Problem(
                        what,
                        allowed=f"{self._replicas.groups} groups with the same recipe, mesh and"
                        " data, but for replicas.group and replicas.host",
                        fix="a lighthouse for each training, and a number for each group",
                    )
                )
        return False

    def _note(self, quorum: Quorum, position: Position) -> None:
        self.share = Share(quorum.rank, quorum.size)
        if quorum.names != self._names:
            numbers = ", ".join(str(parts_of(name)[0]) for name in quorum.names)
            message = f"groups that take part from step {position.step + 1} on: {numbers}"
            self._log.emit("message", position.step, message=message)
        self._names = quorum.names

    # The same state.

    def _join(self, quorum: Quorum, position: Position) -> tuple[dict[str, Any] | None, str | None]:
        """Connects, and sends or gets the state; the facts that came, and what went wrong."""
        _, why = self.attempt(lambda: self.link.connect(quorum, rank=self._ranks.rank))
        if why is not None:
            return None, why
        if quorum.heals_from is None:
            _, why = self.attempt(lambda: self._send(quorum, position))
            return None, why
        facts, why = self.attempt(lambda: self._receive(quorum, position))
        if why is not None:
            with seen_by_every_rank():
                raise RunError(
                    Problem(
                        f"the state of another group did not come whole: {why}",
                        fix="the same command again: it goes on from a checkpoint, or a peer",
                    )
                )
        message = f"took over the state of step {position.step} from another group"
        self._log.emit("message", position.step, message=message)
        return facts, None

    def _send(self, quorum: Quorum, position: Position) -> None:
        for place in quorum.heals:
            facts = self._facts() | {
                "position": position.scalars(),
                "rng": rng.capture().decode(),
            }
            model, optimizers = self._assembly.model, self._assembly.optimizers.optimizers
            send_state(self.link, place, facts, self._local(gather_state(model, optimizers)))

    def _receive(self, quorum: Quorum, position: Position) -> dict[str, Any]:
        origin = quorum.heals_from
        assert origin is not None
        announced = receive_facts(self.link, origin)

        def fill(state: State) -> None:
            receive_tensors(self.link, origin, announced, self._local(state))

        model, optimizers = self._assembly.model, self._assembly.optimizers.optimizers
        # What is not announced is not there.
        fill_training(model, optimizers, announced.tensors, fill, never_updated=True)
        facts = announced.facts
        position.become(
            Position.from_scalars(
                facts["position"],
                data_fingerprint=position.data_fingerprint,
                path=f"group {parts_of(quorum.names[origin])[0]}",
            )
        )
        rng.restore(facts["rng"].encode())
        return facts

    def _local(self, state: State) -> dict[str, Tensor]:
        """What this rank holds of all that belongs to a state."""
        outer = {"outer": self._assembly.outer.state()}
        return {name: local_tensor(tensor) for name, tensor in flatten(state | outer).items()}


def _identity(assembly: Assembly) -> str:
    """Of what is trained, as far as groups have to agree on it."""
    recipe, plain = assembly.recipe, Recipe()
    mode, groups = recipe.replicas.mode, recipe.replicas.groups
    agreed = dataclasses.replace(
        recipe,
        replicas=Replicas(mode=mode, groups=groups),
        checkpoint=plain.checkpoint,
        telemetry=plain.telemetry,
    )
    facts = [recipe_sha256(agreed), assembly.mesh.axes, assembly.data.training.fingerprint]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
