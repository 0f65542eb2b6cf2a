"""Repeats a bad step that the guard has dumped: was it the data, the state, or the machine?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from armillary.checkpoint.find import Found
from armillary.checkpoint.manifest import step_names
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import Problem, RunError, UserError
from armillary.foundation.progress import Progress
from armillary.foundation.run_folder import checkpoints_address
from armillary.foundation.tell import seen_by_every_rank
from armillary.parallel import process
from armillary.parallel.config import Compile, NoCheckpoint
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel
from armillary.parallel.replicas.config import Replicas
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Span
from armillary.resilience.guard import HEALTHY, NOT_FINITE
from armillary.resilience.guard_dump import Replay, Rows, dump_folder, read_replay
from armillary.resilience.roll_call import RollCall
from armillary.telemetry.timing import StepTimer
from armillary.training.assembly import Assembly, assemble, data_at, open_data
from armillary.training.bad_step import described
from armillary.training.feed import StepInput, feed, input_of
from armillary.training.resume import Beginning, begin, restore, span_after
from armillary.training.steps import Steps, Taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A step beside its repetition. Values that JSON cannot say are words."""

    step: int
    samples: tuple[int, int]
    begun_at: int
    """The step of the checkpoint that the repetition began with; 0: first weights."""
    recorded: dict[str, Any]
    """`kind`, `loss`, `gradient_norm`, and `gradients` by rank that are not finite."""
    repeated: dict[str, Any]
    """The same of the repetition, and `modules`: by rank, the first with an output that is not."""
    same_recipe: bool
    """Whether it was repeated with the recipe that it was taken with."""
    reproduced: bool
    """Whether both are bad in the same way: of the same kind, with the same values not finite."""
    bitwise: bool
    """Whether loss and gradient norm are the same to the last bit."""

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def replay(recipe: Recipe, run: Path, *, step: int | None, progress: Progress) -> Replayed:
    """Repeats the dumped step of a run, from the newest checkpoint before it; called on each rank.

    Steps between the two are repeated as well, from the data. The run folder stays as it is.

    Args:
        recipe: the run's.
        run: its folder.
        step: None: the latest that was dumped.
        progress: hears of what takes long.

    Raises:
        UserError: there is no such dump, the dump is damaged, or the recipe does not fit it or the
            ranks.
        RunError: a step on the way is bad as well, so that the state cannot be made again.
    """
    own_sha256 = recipe_sha256(recipe)
    recipe = replace(recipe, replicas=Replicas())  # what other groups have computed is in the dump
    with ExitStack() as stack:
        with seen_by_every_rank():
            dump = read_replay(run, step)
            found = problems(recipe, process.world_size(), data=False)
            if found:
                raise UserError(found)
            device = process.choose_device(recipe.parallel.device)
        if process.init_process_group(device):
            stack.callback(process.destroy)
        roll_call = stack.enter_context(
            RollCall(process.store(), rank=process.rank(), world_size=process.world_size())
        )
        with roll_call.naming_the_lost():
            ranks = stack.enter_context(closing(Ranks()))
            address = checkpoints_address(run, recipe.checkpoint.folder)
            store = stack.enter_context(CheckpointStore(address, recipe.checkpoint))
            newest = _newest_before(dump, store, ranks, progress)
            data = open_data(recipe, progress, ranks)
            with seen_by_every_rank():
                span, borders = span_after(
                    newest, recipe, store.place, ranks, data.stores, looked=True
                )
                span = _watchable(span, dump)
            mesh = Mesh.create(span.recipe.parallel, device)
            assembly = assemble(recipe, mesh, data_at(recipe, data.stores, borders), span)
            with seen_by_every_rank():
                rows = _rows_of(dump, run, assembly.shape.sequences)
            beginning = restore(assembly, store, newest) if newest else begin(assembly)
            repetition = _Repetition(assembly, dump, beginning, ranks, progress)
            return repetition.run(rows, same_recipe=own_sha256 == dump.recipe_sha256)


def _rows_of(dump: Replay, run: Path, sequences: int) -> Rows:
    first, last = dump.samples
    if last - first != sequences:
        raise UserError(
            Problem(
                f"the step had {last - first} sequences, and this recipe's steps have {sequences}",
                f"{last - first} sequences of a step",
                "leave budget.batch_tokens and budget.seq_len as the run had them",
            )
        )
    return Rows(dump_folder(run, dump.step), sequences)


def _newest_before(
    dump: Replay, store: CheckpointStore, ranks: Ranks, progress: Progress
) -> Found | None:
    """The checkpoint to begin with; None: there is none, and the run began with first weights.

    Checkpoints of later steps than the dump tells of may be of another past, to which the run
    went back.
    """
    place, latest = store.place, dump.checkpoint_step
    there = ranks.on_main(lambda: [s for s in step_names(place) if s <= latest])
    for step in there:
        try:
            return store.find(str(step), progress)
        except UserError:  # damaged: the one before takes longer, and serves as well
            continue
    begun_from = dump.begun_from
    return None if begun_from is None else store.find(begun_from, progress)


def _watchable(span: Span, dump: Replay) -> Span:
    """The stage of the dumped step, with a recipe by which its modules can be watched.

    Those inside of compiled blocks cannot, and the last bits are not what is asked.

    Raises:
        UserError: the checkpoint to begin with is of an earlier stage.
    """
    if dump.step > span.last:
        raise UserError(
            Problem(
                f"step {dump.step} is of a later stage than the newest checkpoint before it that"
                f" verifies, which goes on with stage {span.name}, steps {span.first + 1} to"
                f" {span.last}",
                "the checkpoint at the border, or a later one",
            )
        )
    recipe = replace(span.recipe, compile=Compile())
    if recipe.activation_checkpoint.memory_budget is not None:  # the compiler's choice
        recipe = replace(recipe, activation_checkpoint=NoCheckpoint())
    return replace(span, recipe=recipe)


class _Repetition:
    def __init__(
        self, assembly: Assembly, dump: Replay, beginning: Beginning, ranks: Ranks, told: Progress
    ) -> None:
        self._assembly, self._dump = assembly, dump
        self._ranks, self._progress = ranks, told
        self._begun_at = beginning.position.step
        beginning.position.jumped = [list(interval) for interval in dump.jumped]
        self._steps = Steps(
            assembly,
            beginning.position,
            timer=StepTimer(assembly.mesh.device),
            sums=lambda numbers: ranks.sums_and_any(numbers, False)[0],
            lag=0,
        )

    def run(self, rows: Rows, *, same_recipe: bool) -> Replayed:
        """To the step before, and then the dumped batch."""
        self._go_there()
        own = self._assembly.shape.rows()
        microbatches = [rows.batch(each) for each in own]
        mine = input_of(self._assembly, microbatches, own, self._dump.samples)
        with _first_module_at_fault(self._assembly.model) as modules:
            taken = self._take(mine)
        at_fault = taken.result.gradients_at_fault or []
        of_ranks = self._ranks.together(lambda: (modules[:1], at_fault))
        return self._compared(taken, of_ranks, same_recipe)

    def _go_there(self) -> None:
        before, position = self._dump.step - 1, self._steps.position
        label = f"repeating steps {position.step + 1} to {before}"
        with (
            feed(self._assembly, position, until=before) as inputs,
            self._progress.task(label, total=before - position.step, unit="steps") as advance,
        ):
            while position.step < before:
                taken = self._take(next(inputs))
                if taken.result.health.frozen:
                    what = described(taken.result.health)
                    message = f"{what} at step {taken.step}, on the way to step {self._dump.step}"
                    with seen_by_every_rank():
                        raise RunError(Problem(message, "the steps as they were"))
                advance(1)

    def _take(self, mine: StepInput) -> Taken:
        self._steps.take(mine)
        (taken,) = self._steps.read()
        return taken

    def _compared(
        self, taken: Taken, of_ranks: list[tuple[list[str], list[str]]], same_recipe: bool
    ) -> Replayed:
        dump, health = self._dump, taken.result.health
        kinds = {HEALTHY: "healthy", NOT_FINITE: "not finite"}
        kind = kinds.get(health.kind, "spike")
        values = [(dump.loss, health.loss), (dump.gradient_norm, health.gradient_norm)]
        return Replayed(
            step=dump.step,
            samples=dump.samples,
            begun_at=self._begun_at,
            recorded={
                "kind": dump.kind,
                "loss": _word(dump.loss),
                "gradient_norm": _word(dump.gradient_norm),
                "gradients": dump.gradients,
            },
            repeated={
                "kind": kind,
                "loss": _word(health.loss),
                "gradient_norm": _word(health.gradient_norm),
                "gradients": {str(rank): names for rank, (_, names) in enumerate(of_ranks)},
                "modules": {str(rank): name[0] for rank, (name, _) in enumerate(of_ranks) if name},
            },
            same_recipe=same_recipe,
            reproduced=kind == dump.kind
            and all(math.isfinite(first) == math.isfinite(second) for first, second in values),
            bitwise=all(_is_same(*pair) for pair in values),
        )


@contextmanager
def _first_module_at_fault(model: ParallelModel) -> Iterator[list[str]]:
    """Names of modules with an output that is not finite, in the order in which they ended."""
    found: list[str] = []
    with ExitStack() as hooks:
        for part in model.parts:
            for name, module in part.named_modules():

                def look(module: nn.Module, _: Any, output: Any, name: str = name) -> None:
                    if not found and not all(map(_is_finite, _tensors(output))):
                        found.append(name or type(module).__name__)

                hooks.callback(module.register_forward_hook(look).remove)
        yield found


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from _tensors(each)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _is_same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _word(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)
