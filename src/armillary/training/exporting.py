"""Copies of checkpoints in a format that other tools load, made beside training.

They are read from the durable checkpoint and not from the model, in a thread of rank 0: training
waits for one at the end of a stage alone, and what is exported is what could be resumed.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from armillary.checkpoint.find import Found, find_checkpoint
from armillary.checkpoint.hugging_face.exporting import (
    Exported,
    Plan,
    clear_drafts,
    plan_export,
    write_export,
)
from armillary.checkpoint.hugging_face.own import checkpoint_sources
from armillary.checkpoint.hugging_face.source import Sources, Tally
from armillary.checkpoint.manifest import step_name, step_of
from armillary.checkpoint.places.place import unique
from armillary.checkpoint.store import CheckpointStore
from armillary.data.config import Chat
from armillary.data.corpus import corpus_parts
from armillary.data.tokenizer import DESCRIPTION_FILE, load_tokenizer
from armillary.foundation.errors import ArmillaryError, UserError
from armillary.foundation.run_folder import TOKENIZER_FOLDER
from armillary.inference.chat import turn_ends
from armillary.models.tuning.merge import merged_sources
from armillary.parallel import process
from armillary.recipe.recipe import Recipe
from armillary.telemetry.events import EventLog

EXPORTS_FOLDER = "exports"
_GLANCE_SECONDS = 1.0


class _Left(Exception):
    """The run ends before the export does."""


class Exporting:
    """The exports of a run; every rank makes one, and rank 0's works.

    Args:
        recipe: of the run, or of its stage.
        folder: of the run.
        store: where the checkpoints are.
        log: told of what was written, and of what was not.
    """

    def __init__(
        self, recipe: Recipe, *, folder: Path, store: CheckpointStore, log: EventLog
    ) -> None:
        self._recipe, self._run, self._store, self._log = recipe, folder, store, log
        self._every = recipe.export.every if process.rank() == 0 else 0
        self._folder = folder / EXPORTS_FOLDER
        if recipe.export.folder:  # which other runs may write to
            self._folder = Path(recipe.export.folder) / folder.resolve().name
        self._wanted: int | None = None
        self._last: Found | None = None
        """The checkpoint that the newest export is of."""
        self._thread: threading.Thread | None = None
        self._leave = threading.Event()

    def saved(self, step: int, *, final: bool = False) -> None:
        """A save of this step has begun; it will be exported if it is its turn."""
        if self._every > 0 and step > 0 and (step % self._every == 0 or final):
            self.look()  # a save waits for the one before
            if self._wanted is not None and self._wanted != step:
                self._warn(
                    self._wanted, "that of the step before was not done, or it has no checkpoint"
                )
            self._wanted = step

    def look(self) -> None:
        """Begins the export that is wanted once its checkpoint is durable; waits for nothing."""
        step, durable = self._wanted, self._store.durable_step
        if step is None or durable is None or durable < step:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._wanted = None
        name = f"export-{step}"
        self._thread = threading.Thread(target=self._run_one, args=(step,), name=name, daemon=True)
        self._thread.start()

    def finish(self, check: Callable[[], None]) -> None:
        """Waits for what is under way, and for the last one.

        Args:
            check: called meanwhile; may raise to leave both.
        """
        try:
            for _ in range(2):
                while self._thread is not None and self._thread.is_alive():
                    self._thread.join(_GLANCE_SECONDS)
                    check()
                self.look()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves what is under way; nothing of it stays."""
        self._leave.set()
        if self._thread is not None:
            self._thread.join()
        if self._wanted is not None:
            self._say_left(self._wanted)

    def _run_one(self, step: int) -> None:
        """One export; trouble here costs the export, not the run."""
        began = time.perf_counter()
        target = self._folder / step_name(step)
        try:
            found = find_checkpoint(self._store.place, str(step))
            assert found is not None, "a step is found or refused"
            if self._last is not None and found.manifest == self._last.manifest:
                return  # the run ends where it was exported already
            if target.exists():  # of a past that the run has left
                older = target.rename(target.with_name(f"older-{target.name}-{unique()}"))
                self._say(step, f"an older export is now {older}")
            clear_drafts(self._folder)
            made = self._export(found, target)
            self._last = found
            removed = self._thin()
        except _Left:
            self._say_left(step)
            return
        except (ArmillaryError, OSError) as error:
            self._warn(step, " ".join(str(error).split()))
            return
        self._log.emit(
            "message",
            step,
            message=f"exported step {step} to {target}"
            + "".join(f", removed {n}" for n in removed)
            + (f"; {made.left_out}" if made.left_out else ""),
            path=str(target),
            bytes=made.bytes,
            seconds=time.perf_counter() - began,
        )

    def _say_left(self, step: int) -> None:
        again = f"armillary export {self._run} --step {step} --to DIR"
        self._say(step, f"step {step} was not exported, as the run was stopped; {again}")

    def _say(self, step: int, message: str) -> None:
        self._log.emit("message", step, message=message)

    def _warn(self, step: int, why: str) -> None:
        hint = "training goes on; armillary export writes it from the checkpoint"
        words = f"step {step} was not exported to {self._folder / step_name(step)}: {why}"
        self._log.warn(words, where="export", hint=hint, step=step)

    def _export(self, found: Found, target: Path) -> Exported:
        tokenizer, dtype = self._run / TOKENIZER_FOLDER, self._recipe.export.dtype
        plan = plan_of_run(self._recipe, found, dtype=dtype, tokenizer=tokenizer)
        return write_export(plan, target, tokenizer=tokenizer, advance=self._go_on)

    def _go_on(self, count: int) -> None:
        if self._leave.is_set():
            raise _Left

    def _thin(self) -> list[str]:
        """Removes the oldest of our own exports, and returns their names."""
        keep = self._recipe.export.keep_last
        own = sorted(p for p in self._folder.iterdir() if step_of(p.name) is not None)
        gone = own[:-keep] if keep else []
        for path in gone:
            shutil.rmtree(path)
        return [path.name for path in gone]


def plan_of_run(
    recipe: Recipe,
    found: Found,
    *,
    tokenizer: Path,
    dtype: str = "",
    vocab_size: int | None = None,
    extra_layer: bool = False,
) -> Plan:
    """See `plan_export`: a checkpoint of a run, to be begun and stopped as `generate` does it."""
    corpora = [part.corpus for part in corpus_parts(recipe.data.corpus)]
    only_chat = all(isinstance(corpus, Chat) for corpus in corpora)
    return plan_export(
        recipe.model,
        plain_sources(recipe, found),
        dtype=dtype,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        extra_layer=extra_layer,
        bos=recipe.data.bos and not only_chat,  # of conversations, the template decides
        turn_ends=_turn_ends(tokenizer, needed=only_chat),
    )


def _turn_ends(folder: Path, *, needed: bool) -> frozenset[int]:
    """Tokens that end a turn by the run's chat template; none where there is no template."""
    if not (folder / DESCRIPTION_FILE).is_file():
        return frozenset()
    tokenizer = load_tokenizer(folder)
    try:
        return turn_ends(tokenizer) if tokenizer.chat_template else frozenset()
    except UserError:  # an imported template may be one that we do not render
        if needed:
            raise
        return frozenset()


def plain_sources(recipe: Recipe, found: Found) -> Sources:
    """The weights of a checkpoint as those of the plain model."""
    return merged_sources(checkpoint_sources(found, Tally()), recipe.tuning.low_rank_scale)
