"""Bad input: one clear error naming what, allowed and next; the right exit code; nothing harmed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from armillary.cli.main import main
from armillary.foundation.errors import UserError
from armillary.recipe.toml import to_toml
from armillary.resilience.claim import claim_run
from armillary.training.train import train
from snapshots import assert_matches_snapshot
from tiny_runs import tiny_recipe, write_corpus

SNAPSHOTS = Path(__file__).parent / "snapshots"
Prepare = Callable[[Path, pytest.MonkeyPatch], None]


def nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is bad by itself."""


def no_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "wandb" else find(name, *rest),
    )


def file(name: str, content: bytes | str) -> Prepare:
    def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def corpus_line(line: bytes) -> Prepare:
    def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        good = json.dumps({"text": "a good line"}).encode() + b"\n"
        (folder / "other.jsonl").write_bytes(good * 2 + line + b"\n" + good)

    return prepare


def a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run of three steps in `run`."""
    assert train(tiny_recipe(folder, steps=3), name="tiny", folder=folder / "run") == 0


def a_damaged_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(folder, monkeypatch)
    tensors = next((folder / "run" / "checkpoints" / "step-00000003").glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)


def a_run_on_other_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(folder, monkeypatch)
    write_corpus(folder, seed=1)


def a_foreign_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("years of work")


def a_busy_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claim_run(folder / "run")
    monkeypatch.setattr("armillary.kept_open", claim, raising=False)


def a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 4096, 4096))


def a_read_only_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root may write anywhere, so the refusal is simulated where the system would give it."""
    original = Path.mkdir

    def refuse(self: Path, *args: object, **keywords: object) -> None:
        if self.name == "run":
            raise PermissionError(13, os.strerror(13), str(self))
        original(self, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)


def a_foreign_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer.json with more tokens than the model has."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"token-{number}": number for number in range(300)} | {"[UNK]": 300}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "big.json"))


@dataclass(frozen=True)
class Case:
    name: str
    typed: str
    """After `armillary train --from-file recipe.toml --run run`, or a whole command line."""
    prepare: Prepare = nothing
    exit_code: int = 2
    whole: bool = False


OTHER = "--data.corpus jsonl --data.corpus.files other.jsonl"
CASES = [
    Case("unknown_recipe", "train strater", whole=True),
    Case("unknown_key", "--model.dims 64"),
    Case("several_problems_at_once", "--model.dims 64 --optimizer.lr fast --optimizer adam"),
    Case("wrong_type", "--budget.steps many"),
    Case("steps_and_tokens_missing", "--budget.steps none"),
    Case("batch_no_multiple_of_sequence", "--budget.batch-tokens 500"),
    Case("microbatch_does_not_divide", "--budget.microbatch-sequences 5"),
    Case("batch_cannot_be_shared", "--nproc 3"),
    Case("sequence_longer_than_model", "--budget.seq-len 128"),
    Case("heads_do_not_divide", "--model.n-heads 5"),
    Case("kv_heads_do_not_divide", "--model.n-kv-heads 3"),
    Case("negative_rate", "--optimizer.lr -1"),
    Case("rate_is_not_a_number", "--optimizer.lr nan"),
    Case("warmup_longer_than_run", "--schedule.warmup-steps 500"),
    Case("unknown_format", "--precision.compute float17"),
    Case("mesh_does_not_fit", "--parallel.dp-replicate 2 --parallel.dp-shard 3"),
    Case("device_is_not_there", "--parallel.device cuda"),
    Case("attention_cannot_train_here", "--model.attention flex"),
    Case("pattern_matches_nothing", "--optimizer.no-decay embeding.*"),
    Case("extra_is_missing", "--telemetry.wandb true", no_wandb),
    Case("fraction_out_of_range", "--data.validation-fraction 1.5"),
    Case("vocabulary_too_small", "--model.vocab-size 200"),
    Case("sample_without_tokens", "--sampling.prompts it --sampling.tokens 0"),
    Case("sample_longer_than_model", "--sampling.prompts it --sampling.tokens 64"),
    Case("toml_is_broken", "train --from-file bad.toml", file("bad.toml", "[model\n"), whole=True),
    Case(
        "toml_has_unknown_key",
        "train --from-file bad.toml",
        file("bad.toml", "[optimzer]\nlr = 1.0\n"),
        whole=True,
    ),
    Case("no_such_file", "--data.corpus text --data.corpus.files nowhere/*.txt"),
    Case("corpus_is_empty", OTHER, file("other.jsonl", "")),
    Case("corpus_is_a_folder", OTHER, lambda folder, _: (folder / "other.jsonl").mkdir()),
    Case("line_is_broken", OTHER, corpus_line(b'{"text": "half')),
    Case("field_is_missing", OTHER, corpus_line(b'{"body": "elsewhere"}')),
    Case("text_is_not_utf8", OTHER, corpus_line(b'{"text": "caf\xe9"}')),
    Case(
        "file_is_not_utf8",
        "--data.corpus text --data.corpus.files latin.txt",
        file("latin.txt", b"caf\xe9 " * 50),
    ),
    Case(
        "corpus_shorter_than_a_sample",
        f"{OTHER} --data.packing concatenate --data.validation-fraction 0 --budget.seq-len 64",
        corpus_line(b'{"text": "tiny"}'),
    ),
    Case(
        "tokenizer_is_missing", "--data.tokenizer file --data.tokenizer.path nowhere/tokenizer.json"
    ),
    Case(
        "tokenizer_is_corrupt",
        "--data.tokenizer file --data.tokenizer.path bad.json",
        file("bad.json", '{"model": '),
    ),
    Case(
        "tokenizer_larger_than_model",
        "--data.tokenizer file --data.tokenizer.path big.json --no-data.bos --no-data.eos",
        a_foreign_tokenizer,
    ),
    Case("checkpoint_step_is_missing", "--resume 999", a_run),
    Case("checkpoint_path_is_missing", "--resume nowhere"),
    Case("checkpoint_is_damaged", "--budget.steps 5", a_damaged_run),
    Case("checkpoint_is_beyond_the_budget", "--budget.steps 2 --schedule.warmup-steps 1", a_run),
    Case("checkpoint_of_other_data", "--budget.steps 5", a_run_on_other_data),
    Case("checkpoint_of_other_model", "--budget.steps 5 --model.ffn-dim 96", a_run),
    Case("run_folder_is_foreign", "", a_foreign_folder),
    Case("run_folder_is_a_file", "", file("run", "a file")),
    Case("run_folder_is_busy", "", a_busy_folder),
    Case("disk_is_full", "", a_full_disk),
    Case("folder_is_read_only", "", a_read_only_disk),
    Case("loss_is_not_finite", "--optimizer.lr 1e30 --max-gradient-norm inf", exit_code=1),
    Case("generate_from_a_foreign_folder", "generate run", a_foreign_folder, whole=True),
    Case("show_a_foreign_folder", "runs show run", a_foreign_folder, whole=True),
]


def digests(folder: Path) -> dict[str, str]:
    """Contents of what is there, but for locks."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "lock" not in path.name
    }


def page_of(run: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What `runs show` tells of a run; None where there is none."""
    capsys.readouterr()
    if not (run / "events.jsonl").exists():
        return None
    assert main(["runs", "show", str(run), "--json"]) == 0
    page = capsys.readouterr().out
    assert json.loads(page)["state"] == "finished"
    return page


def comparable(text: str, folder: Path) -> str:
    """The text without what differs from place to place."""
    text = text.replace(str(folder), "FOLDER")
    text = re.sub(r"process \d+ on \S+ \(since [^)]*\)", "process PID on HOST (since TIME)", text)
    return re.sub(r"\b[0-9a-f]{12,64}\b", "HASH", text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_told_clearly_and_harms_nothing(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(to_toml(tiny_recipe(tmp_path, steps=12)))
    case.prepare(tmp_path, monkeypatch)
    before, page = digests(tmp_path), page_of(tmp_path / "run", capsys)

    typed = case.typed if case.whole else f"train --from-file recipe.toml --run run {case.typed}"
    code = main(typed.split())

    shown = capsys.readouterr()
    assert code == case.exit_code, shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    after = digests(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert page is None or page_of(tmp_path / "run", capsys) == page
    assert_matches_snapshot(
        f"$ armillary {typed.strip()}\n{comparable(shown.err, tmp_path)}",
        SNAPSHOTS / f"{case.name}.txt",
    )


def test_there_are_enough_cases_and_each_is_told_with_what_to_do() -> None:
    assert len(CASES) >= 30
    for case in CASES:
        text = (SNAPSHOTS / f"{case.name}.txt").read_text()
        assert text.count("error: ") >= 1, case.name
        assert "allowed: " in text or "try: " in text, case.name


def test_a_folder_for_checkpoints_that_is_the_run_folder_is_told_as_that(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=3)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    checkpoint = replace(recipe.checkpoint, folder=str(tmp_path / "link"))
    with pytest.raises(UserError, match="link is the run folder itself"):
        train(replace(recipe, checkpoint=checkpoint), name="tiny", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
