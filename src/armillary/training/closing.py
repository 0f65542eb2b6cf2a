"""The end of a run: all held-out text, a yardstick, some writing, and three lines to go on from."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from armillary.foundation.progress import Progress
from armillary.inference.generate import generate, generation_problems
from armillary.telemetry.events import EventLog
from armillary.telemetry.format import quantity
from armillary.training.assembly import Assembly
from armillary.training.compressors import CompressorBits, measure_compressors
from armillary.training.interruptible import Interruptible
from armillary.training.session import Session
from armillary.training.validation import ValidationResult

MOST_COMPRESSED_BYTES = 256 * 10**6
"""Held-out text beyond this is not given to the compressors: `xz -9e` reads about 2 MB a second."""

_LONGEST_PROMPT_SHOWN = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """What a finished run has to show."""

    validation: dict[str, ValidationResult]
    compressors: CompressorBits | None
    """Of the same held-out documents; None where they were not asked."""


def close_run(session: Session, log: EventLog, progress: Progress) -> Closing:
    """Scores all held-out text, asks the tasks, measures the compressors, writes samples.

    Raises:
        Stopped: a stop was asked for; the run itself is complete and saved.
    """
    assembly = session.assembly
    results = session.validate(assembly.data.final_validation, prefix="final-")
    session.evaluate()
    compressors = None
    if results and (reason := _reason_not_to_compress(assembly)):
        message = f"the compressors were not asked: {reason}"
        log.emit("message", session.position.step, message=message)
    elif results:
        checked = Interruptible(progress, session.stop.request.check)  # of one rank: all hear of it
        compressors = session.stop.ranks.on_main(lambda: _compressors(assembly, checked))
        log.emit(
            "message",
            session.position.step,
            message=f"held-out text in bits per byte: gzip -9 each {compressors.gzip_each:.3f},"
            f" gzip -9 all {compressors.gzip_all:.3f}, xz -9e all {compressors.xz_all:.3f}",
            gzip_each=compressors.gzip_each,
            gzip_all=compressors.gzip_all,
            xz_all=compressors.xz_all,
        )
    _write_samples(session, log, progress)
    return Closing(validation=results, compressors=compressors)


def _reason_not_to_compress(assembly: Assembly) -> str:
    """Empty if the compressors can be asked about what was scored."""
    if assembly.recipe.validation.final_sequences:
        return "a part of the held-out text was scored"
    size = sum(split.n_bytes for split in assembly.data.store.validation)
    if size > MOST_COMPRESSED_BYTES:
        return f"{size / 1e6:,.0f} MB of held-out text would take them long"
    return ""


def _compressors(assembly: Assembly, progress: Progress) -> CompressorBits:
    documents = [
        document for split in assembly.data.store.validation for document in split.documents_bytes()
    ]
    total = 3 * sum(map(len, documents))
    with progress.task("compressing the held-out text, to compare", total, "B") as advance:
        return measure_compressors(documents, advance)


def _write_samples(session: Session, log: EventLog, progress: Progress) -> None:
    assembly, sampling = session.assembly, session.assembly.recipe.sampling
    if not sampling.prompts:
        return
    tokenizer = assembly.data.store.tokenizer
    bos = tokenizer.bos_id if assembly.recipe.data.bos else None
    start = [] if bos is None else [bos]
    prompts = [start + list(tokenizer.encode(prompt)) for prompt in sampling.prompts]
    unwritable = generation_problems(
        prompts,
        max_seq_len=assembly.model.max_seq_len,
        max_new_tokens=sampling.tokens,
        temperature=sampling.temperature,
        top_k=0,
        top_p=1.0,
        seed=assembly.recipe.seed,
    )
    for problem in unwritable:  # no failure: the run itself is complete
        hint = f"armillary generate, with {problem.fix}" if problem.fix else "armillary generate"
        log.warn(problem.message, where="sampling", hint=hint, step=session.position.step)
    if unwritable:
        return
    total = sampling.tokens * len(prompts)
    with progress.task("writing", total=total, unit="tokens") as advance:

        def on_token(*_: object) -> None:
            session.stop.check()
            advance(1)

        written = generate(
            assembly.model,
            prompts,
            max_new_tokens=sampling.tokens,
            temperature=sampling.temperature,
            seed=assembly.recipe.seed,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
            on_token=on_token,
        )
    for prompt, ids in zip(sampling.prompts, written, strict=True):
        text = tokenizer.decode(ids)
        log.emit("sample", session.position.step, prompt=prompt, text=text)


def closing_lines(closing: Closing, session: Session, folder: Path) -> list[str]:
    """What was learned and what to run next, in three lines."""
    position, recipe = session.position, session.assembly.recipe
    parameters = recipe.model.parameter_count()
    learned = (
        f"learned: {quantity(parameters)} parameters read {quantity(position.tokens_total)}"
        f" tokens in {position.step:,} steps"
    )
    if len(closing.validation) == 1:
        bits = next(iter(closing.validation.values())).bits_per_byte
        learned += f"; unseen text costs {bits:.3f} bits per byte"
        compared = _compared(bits, closing.compressors)
    else:
        compared = ", ".join(
            f"{name} {result.bits_per_byte:.3f} bits per byte"
            for name, result in closing.validation.items()
        )
    run = shlex.quote(str(folder))
    prompt = next((shlex.quote(text) for text in recipe.sampling.prompts if _fits(text)), "TEXT")
    return [
        learned,
        f"compare: {compared or 'no text was held out'}",
        f"next:    armillary generate {run} --prompt {prompt}   |   armillary runs show {run}",
    ]


def _fits(prompt: str) -> bool:
    """Whether a prompt can be typed as it is shown, on a line."""
    short = 0 < len(prompt) <= _LONGEST_PROMPT_SHOWN
    return short and prompt.isprintable() and not prompt.startswith("-")


def _compared(bits: float, compressors: CompressorBits | None) -> str:
    if compressors is None:
        return "the compressors were not asked"
    yardsticks = {
        "gzip -9 of each file": compressors.gzip_each,
        "gzip -9 of all": compressors.gzip_all,
        "xz -9e of all": compressors.xz_all,
    }
    beaten = [name for name, value in yardsticks.items() if bits < value]
    verdict = f"beats {', '.join(beaten)}" if beaten else "beats none of them yet"
    return ", ".join(f"{name} {value:.3f}" for name, value in yardsticks.items()) + f": {verdict}"
