import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import telemetry_examples as examples
from armillary.cli.main import main
from armillary.telemetry import summary
from armillary.telemetry.events import EventLog
from armillary.telemetry.history import read_history


def write_run(
    folder: Path, steps: int = 20, stop: tuple[str, int] | None = None, **start: Any
) -> Path:
    folder.mkdir(parents=True)
    with EventLog(folder / "events.jsonl", clock=examples.Ticks(each=0.5)) as log:
        log.emit("start", 0, **examples.start(**start))
        for number in range(1, steps + 1):
            log.emit("step", number, **examples.step(number))
        for number, bits in ((10, 1.75), (20, 1.5), (20, 1.625)):
            log.emit("validation", number, **examples.validation(bits_per_byte=bits))
        log.emit("checkpoint", 10, **examples.checkpoint("durable", 10))
        log.emit("checkpoint", 20, **examples.checkpoint("staged", 20))
        log.emit("checkpoint", 20, **examples.checkpoint("durable", 20))
        log.emit("checkpoint", 20, **examples.checkpoint("removed", 10))
        log.emit("warning", 15, message="slow disk", where="checkpoint", hint="use another")
        if stop is not None:
            log.emit("stop", steps, reason=stop[0], exit_code=stop[1])
    return folder


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["runs", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


TABLE = """\
name     recipe    steps    loss  bits/byte  tokens  state     age
done     starter  20/200  4.0000     1.5000   81.9K  finished  40s
failed   starter  20/200  4.0000     1.5000   81.9K  failed    40s
gone     starter  20/200  4.0000     1.5000   81.9K  stopped   40s
live     starter  20/200  4.0000     1.5000   81.9K  running   40s
rubbish  n/a           0     n/a        n/a     n/a  empty     n/a"""

PAGE = """\
run         RUN
recipe      starter
state       finished: all steps done (exit code 0)
steps       20 of 200
tokens      81.9K
parameters  3.3M
last sign   40s ago
loss        7.6190 -> 4.0000
            █▇▇▆▆▅▅▄▄▄▃▃▃▂▂▂▂▁▁▁
held out    validation 1.6250 bits/byte, best 1.5000
speed       8,123 tokens/s, mfu 41.2 %, 1.2 GiB peak memory (median of the last 20 steps)
time        10s in steps: data 0.3 %, forward-backward 80.0 %, optimizer 10.0 %, checkpoint 0.0 %, other 9.7 %
checkpoints step-00000020  37.8 MiB
warnings    warning at step 15: slow disk (use another)"""  # noqa: E501


def test_the_list_tells_how_each_run_ended(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "done", stop=("all steps done", 0))
    write_run(tmp_path / "failed", stop=("loss is not finite", 1))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_run(tmp_path / "gone", pid=dead.pid)
    write_run(tmp_path / "live", pid=os.getpid(), host=f"not-{socket.gethostname()}")
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "events.jsonl").touch()
    (tmp_path / "not a run").mkdir()
    last = read_history(tmp_path / "done").last_time
    assert last is not None
    monkeypatch.setattr(summary.time, "time", lambda: last + 40.0)
    code, out, err = call(capsys, "list", str(tmp_path))
    assert (code, err) == (0, "")
    assert out.rstrip("\n") == TABLE
    code, out, _ = call(capsys, "list", str(tmp_path), "--json")
    states = {each["name"]: each["state"] for each in json.loads(out)}
    assert states["gone"] == "stopped"
    assert json.loads(out)[0]["best_bits_per_byte"] == 1.5
    code, out, _ = call(capsys, "list", str(tmp_path / "done"))
    assert len(out.splitlines()) == 2


def test_a_run_is_shown_in_full(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "runs" / "done", stop=("all steps done", 0))
    last = read_history(run).last_time
    assert last is not None
    monkeypatch.setattr(summary.time, "time", lambda: last + 40.0)
    code, out, err = call(capsys, "show", str(run))
    assert (code, err) == (0, "")
    assert out.rstrip("\n") == PAGE.replace("RUN", str(run))
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "show", "done", "--json")
    shown = json.loads(out)
    assert shown["losses"][0] == [1, 8.0 / 1.05]
    assert shown["shares"]["forward_backward"] == pytest.approx(0.8)
    assert [each["step"] for each in shown["checkpoints"]] == [20]


def test_a_terminal_without_the_characters_of_a_chart_gets_them_escaped(tmp_path):
    run = write_run(tmp_path / "run", stop=("finished", 0))
    made = subprocess.run(
        [sys.executable, "-m", "armillary", "runs", "show", str(run)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, b"")
    assert b"\\u2581" in made.stdout


def test_a_resumed_run_counts_repeated_steps_once(tmp_path):
    run = write_run(tmp_path / "run", steps=20, stop=("interrupted", 75))
    assert read_history(run).state() == "stopped"
    with EventLog(run / "events.jsonl") as log:
        log.emit("start", 10, **examples.start(resumed_from=10))
        for number in (11, 12):
            log.emit("step", number, **examples.step(number, loss=0.5))
    history = read_history(run)
    assert (history.last_step, history.starts, history.loss) == (12, 2, 0.5)
    assert sorted(history.steps) == list(range(1, 13))
    assert history.best_bits_per_byte == 1.75
    assert history.state() == "running"


def test_a_checkpoint_removed_after_the_run_was_moved_is_not_shown(tmp_path):
    run = write_run(tmp_path / "run")
    with EventLog(run / "events.jsonl") as log:
        elsewhere = {"path": "/moved/checkpoints/step-00000020"}
        log.emit("checkpoint", 20, **examples.checkpoint("removed", 20, **elsewhere))
    assert read_history(run).kept_checkpoints() == []


def test_a_torn_tail_does_not_hide_a_run(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": 1')
    code, out, _ = call(capsys, "show", str(run))
    assert code == 0
    assert "steps       20 of 200" in out


ERRORS = {
    ("show", "absent"): "error: absent: no such folder\n       try: armillary runs list\n",
    ("show", "foreign"): (
        "error: foreign: not a run folder, there is no events.jsonl in it\n"
        "       allowed: a folder that `armillary train --run` has written\n"
        "       try: armillary runs list\n"
    ),
    ("list", "absent"): (
        "error: absent: no such folder\n"
        "       allowed: a folder that holds run folders\n"
        "       try: armillary train, which makes runs/NAME, or armillary runs list FOLDER\n"
    ),
    ("list", "foreign"): (
        "error: foreign: there are no runs in it\n"
        "       allowed: a folder that holds run folders (with events.jsonl)\n"
        "       try: armillary runs list FOLDER\n"
    ),
}


@pytest.mark.parametrize(("words", "message"), ERRORS.items(), ids=" ".join)
def test_missing_and_foreign_folders_are_one_clear_error(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    assert call(capsys, *words) == (2, "", message)


def test_before_the_first_run_the_list_is_empty(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "list") == (0, "no runs yet: armillary train\n", "")
    assert call(capsys, "list", "--json") == (0, "[]\n", "")


def test_events_of_something_else_are_an_error_to_show_and_a_state_in_the_list(tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "events.jsonl").write_text('{"event": "click"}\n')
    code, out, err = call(capsys, "show", str(other))
    assert (code, out) == (2, "")
    assert "events.jsonl: not the events of a run" in err
    (other / "events.jsonl").write_text("one\ntwo\n")
    code, out, err = call(capsys, "show", str(other))
    assert (code, out) == (1, "")
    assert "events.jsonl, line 1: not an event" in err
    code, out, _ = call(capsys, "list", str(tmp_path))
    assert code == 0
    assert "unreadable" in out


START = {"time": 1.0, "kind": "start", "rank": 0, "step": 0, **examples.start()}
FOREIGN = {
    "time": {"time": "2024", "kind": "foo"},
    "no time": {"kind": "foo"},
    "kind": {"time": 1, "kind": 3},
    "step": {"time": 1, "kind": "step", "step": "one"},
    "loss": {"time": 1, "kind": "step", "rank": 0, **examples.step(1), "step": 1, "loss": "low"},
    "recipe": {**START, "recipe": 5},
    "resumed": {**START, "resumed_from": "x"},
    "stop": {"time": 1, "kind": "stop"},
    "stop of nothing": {"time": 1, "kind": "stop", "rank": 0, "step": 0, "reason": 1},
    "infinite": {**START, "time": float("inf")},
    "huge": {**START, "total_steps": 10**400},
    "name": {"time": 1, "kind": "validation", "rank": 0, "step": 0, **examples.validation()}
    | {"name": ["a"]},
}


@pytest.mark.parametrize("event", FOREIGN.values(), ids=FOREIGN)
def test_one_foreign_log_hides_no_other_run(event, tmp_path, capsys):
    write_run(tmp_path / "done", stop=("all steps done", 0))
    (tmp_path / "foreign").mkdir()
    lines = [json.dumps(START), json.dumps(event)]
    (tmp_path / "foreign" / "events.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = call(capsys, "list", str(tmp_path))
    assert (code, err) == (0, "")
    assert "unreadable" in out
    assert "finished" in out
    code, out, err = call(capsys, "show", str(tmp_path / "foreign"))
    assert (code, out) == (2, "")
    assert "events.jsonl: not the events of a run: " in err


def test_the_best_score_is_of_all_held_out_text_once_that_was_scored(tmp_path):
    run = write_run(tmp_path / "run")
    with EventLog(run / "events.jsonl") as log:
        scored = examples.validation(bits_per_byte=1.875) | {"name": "final-validation"}
        log.emit("validation", 20, **scored)
    assert read_history(run).best_bits_per_byte == 1.875


def test_runs_needs_no_torch(tmp_path):
    write_run(tmp_path / "run")
    code = (
        "import sys; from armillary.cli.main import main\n"
        f"assert main(['runs', 'list', {str(tmp_path)!r}]) == 0\n"
        f"assert main(['runs', 'show', {str(tmp_path / 'run')!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
