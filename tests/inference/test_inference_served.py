"""A trained model asked on several ranks: the commands `generate` and `eval`, and lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.store import CheckpointStore
from armillary.cli.generated_text import Stream
from armillary.cli.main import main
from armillary.data.tokenizer import save_tokenizer
from armillary.data.tokenizer_bytes import Bytes, ByteTokenizer
from armillary.models import Llama
from armillary.recipe import Recipe, to_toml
from model_cases import build

MODEL = Llama(
    vocab_size=260, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=256
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("served") / "run"
    run.mkdir()
    recipe = Recipe(model=MODEL)
    recipe = replace(recipe, data=replace(recipe.data, tokenizer=Bytes()))
    recipe = replace(recipe, precision=replace(recipe.precision, compute="float32"))
    (run / "recipe.toml").write_text(to_toml(recipe))
    save_tokenizer(ByteTokenizer(), run / "tokenizer")
    with CheckpointStore(run / "checkpoints", Checkpoint(asynchronous=False)) as store:
        store.save(2, gather_state(build(MODEL)), {"step": 2})
    return run


def armillary(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "armillary", *words]
    return subprocess.run(
        command, capture_output=True, text=True, input=given, env=ENVIRONMENT, timeout=120
    )


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


PROMPTS = ["def ", "a longer\x0cbeginning\u2028of one line", "é", "x"]
"""With characters that end a line for Python, and for nobody else."""
WRITING = ["--max-new-tokens", "9", "--temperature", "0.7"]


def test_prompts_come_from_the_command_line_or_a_file_and_are_written_in_batches(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run), *WRITING]
    given = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    expected = asked(capsys, *words, *given)["texts"]
    assert [text["prompt"] for text in expected] == PROMPTS
    lines, plain = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    plain.write_text("\r\n".join(PROMPTS))
    for file in (lines, plain):
        assert asked(capsys, *words, "--prompts-file", str(file), "--batch", "3")["texts"] == (
            expected
        )


def test_a_prompt_of_several_lines_is_shown_as_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run), "--max-new-tokens", "3", "--prompt", "one\ntwo"]
    (text,) = asked(capsys, *words)["texts"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"one\ntwo{text['text']}\n"


@pytest.mark.full
def test_ranks_write_what_one_process_writes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run), *WRITING, "--json"]
    given = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    expected = asked(capsys, *words[:-1], *given)["texts"]
    spread = ["--nproc", "2", "--parallel.tp", "2", "--batch", "3"]
    done = armillary(*words, *spread, "--prompt", "-", given="\n".join(PROMPTS))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["texts"] == expected


@pytest.mark.full
def test_torchrun_starts_the_ranks_as_well_and_nothing_is_read_from_its_standard_input(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "--", "armillary", *words]
        return subprocess.run(
            command, capture_output=True, text=True, input="x\n", env=ENVIRONMENT, timeout=120
        )

    words = ["generate", str(run), *WRITING, "--prompt", "def "]
    expected = asked(capsys, *words)["texts"]
    done = torchrun(*words, "--parallel.tp", "2", "--json")
    assert (done.returncode, json.loads(done.stdout)["texts"]) == (0, expected), done.stderr
    alone = asked(capsys, "eval", str(run))["tasks"]
    done = torchrun("eval", str(run), "--json")
    assert done.returncode == 0, done.stderr
    spread = json.loads(done.stdout)["tasks"]
    assert {name: task["metrics"] for name, task in spread.items()} == (
        {name: task["metrics"] for name, task in alone.items()}
    )
    done = torchrun("generate", str(run), "--prompt", "-")
    assert "try: --prompts-file FILE" in done.stderr


def test_a_text_is_streamed_in_whole_characters(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ByteTokenizer()
    text = "aé星😀\n" + "b" * 3
    stream, shown = Stream(tokenizer), []
    for token in tokenizer.encode(text):
        stream.add(0, token)
        shown.append(capsys.readouterr().out)
    stream.finish()
    assert capsys.readouterr().out == "\n"
    assert [part for part in shown if part] == list(text)
    broken = Stream(tokenizer)
    for token in (*b"x\xf0", *b"\x9f"):
        broken.add(0, token)
    broken.finish()
    assert capsys.readouterr().out == "x\ufffd\n"


def test_eval_without_tasks_asks_those_of_the_package(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = asked(capsys, "eval", str(run))
    assert set(alone["tasks"]) == {"bits-per-byte", "cloze", "multiple-choice"}
    assert (alone["step"], alone["failed"]) == (2, {})
    assert main(["eval", str(run), "--tasks", "cloze", "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["task", "metric", "value", "error", "items"]
    assert [line.split()[:2] for line in lines[2:]] == [["cloze", "accuracy"], ["cloze", "nats"]]


@pytest.mark.full
def test_eval_gives_the_same_figures_on_several_ranks(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = asked(capsys, "eval", str(run))
    done = armillary("eval", str(run), "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    spread = json.loads(done.stdout)
    assert spread["mesh"]["dp_shard"] == 2
    for name, task in alone["tasks"].items():
        assert spread["tasks"][name]["metrics"] == task["metrics"]


def test_a_task_of_ones_own_is_named_by_leaves_and_one_that_fails_ends_with_1(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"context": "a", "target": "b"}\n')
    task = ["--evaluation.tasks.0", "cloze", "--evaluation.tasks.0.files", str(file)]
    found = asked(capsys, "eval", str(run), *task)
    assert found["tasks"]["cloze"]["items"] == 1
    file.write_text("{}\n")
    assert main(["eval", str(run), *task]) == 1
    assert f"failed: cloze: {file}:1: no 'text'" in capsys.readouterr().out
    file.unlink()
    more = ["--evaluation.tasks.1", "multiple-choice"]
    assert main(["eval", str(run), *task, *more, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == {"cloze": f"cannot read {file}: No such file or directory"}
    assert list(found["tasks"]) == ["multiple-choice"]
    assert main(["eval", str(run), *task[:-1], "no.jsonl"]) == 1
    assert f"(looked for from {Path.cwd()})" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "clozes"], "there is no task 'clozes'"),
        (["--limit", "0"], "--limit 0"),
        (["--lm-eval-shots", "2"], "none is given"),
        (["--parallel.tp", "2"], "parallel.tp = 2 needs 2 ranks"),
        (["--lm-eval", ""], "--lm-eval is empty"),
        (["--lm-eval-shots", "0"], "none is given"),
        (["--taks", "cloze"], "try: --tasks"),
        (["--step", "9"], "no checkpoint of step 9"),
        (["--parallel.cpu-offload"], "parallel.cpu_offload = true"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_started(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["eval", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def lm_eval_task(folder: Path, name: str, **fields: Any) -> None:
    data = folder / f"{name}.jsonl"
    records = [
        {"question": "2+2=", "choices": ["4", "five"], "answer": 0},
        {"question": "The sky is", "choices": ["blue", "made of wood"], "answer": 0},
        {"question": "Bees make", "choices": ["bread", "honey"], "answer": 1},
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


@pytest.mark.full
def test_lm_eval_asks_local_tasks_of_ranks_and_agrees_with_our_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    lm_eval_task(
        tmp_path, "own_choice", output_type="multiple_choice", doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}", metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip
    lm_eval_task(
        tmp_path, "own_writing", output_type="generate_until", doc_to_target="{{choices[answer]}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 5},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    lm_eval_task(
        tmp_path, "own_text", output_type="loglikelihood_rolling", doc_to_target="{{question}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    names = "own_choice,own_writing,own_text"
    words = ["eval", str(run), "--lm-eval", names, "--lm-eval-path", str(tmp_path)]
    done = armillary(*words, "--nproc", "2", "--parallel.tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tasks"]
    assert {name: task["items"] for name, task in found.items()} == dict.fromkeys(found, 3)

    file = str(tmp_path / "own_choice.jsonl")
    kinds = ["multiple-choice", "bits-per-byte"]
    ours = asked(
        capsys, "eval", str(run), "--no-data.eos", "--tasks", ",".join(kinds),
        "--evaluation.tasks.0", kinds[0], "--evaluation.tasks.0.files", file,
        "--evaluation.tasks.1", kinds[1], "--evaluation.tasks.1.corpus", "jsonl",
        "--evaluation.tasks.1.corpus.files", file,
        "--evaluation.tasks.1.corpus.field", "question",
    )["tasks"]  # fmt: skip
    choice = ours["multiple-choice"]["metrics"]
    theirs = found["own_choice"]["metrics"]
    assert (theirs["acc"], theirs["acc_norm"]) == (choice["accuracy"], choice["accuracy_per_byte"])
    bits = ours["bits-per-byte"]["metrics"]["bits_per_byte"]
    assert found["own_text"]["metrics"]["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


@pytest.mark.full
def test_an_unknown_task_of_lm_eval_ends_in_words(run: Path) -> None:
    pytest.importorskip("lm_eval")
    done = armillary("eval", str(run), "--lm-eval", "helaswag")
    assert (done.returncode, "try: --lm-eval hellaswag" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
