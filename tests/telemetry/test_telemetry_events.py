import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import telemetry_examples as examples
from armillary.foundation.errors import RunError
from armillary.telemetry import schema
from armillary.telemetry.events import EventLog, cut_torn_tail, read_events
from armillary.telemetry.schema import checked_event

DOCS = Path(__file__).parents[2] / "docs"


class Recorder:
    def __init__(self, fails_at: int | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.fails_at = fails_at
        self.closed = False

    def on_event(self, event: dict[str, Any]) -> None:
        if len(self.events) == self.fails_at:
            raise ConnectionError("no route")
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def test_an_event_is_one_write_of_one_json_line(tmp_path, monkeypatch):
    writes = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(bytes(data)) or real(fd, data))
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock=examples.Ticks()) as log:
        log.emit("start", 0, **examples.start())
        log.emit("step", 1, **examples.step(1), note="line\nend \udc80 é \u2028")
    assert len(writes) == 2
    assert path.read_bytes() == b"".join(writes)
    first, second = read_events(path)
    assert (first["kind"], first["schema"], first["pid"]) == ("start", 1, os.getpid())
    assert second["note"] == "line\nend \udc80 é \u2028"
    assert second["time"] == examples.BEGUN


def test_a_log_that_is_killed_has_only_whole_lines_and_goes_on(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import sys, pathlib, itertools\n"
        "from armillary.telemetry.events import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "for n in itertools.count(1):\n"
        "    log.emit('message', n, message='x' * (n % 3000))\n"
        "    if n == 300: print('go', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"go\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert [event["step"] for event in read_events(path)] == list(
        range(1, len(path.read_bytes().splitlines()) + 1)
    )
    before = path.read_bytes()
    with EventLog(path) as log:
        log.emit("message", 0, message="again")
    assert path.read_bytes().startswith(before)
    assert [event["message"] for event in read_events(path)][-1] == "again"


def test_a_torn_last_line_is_cut_wherever_it_is_torn_and_a_warning_says_so(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock=examples.Ticks()) as log:
        log.emit("message", 1, message="kept")
        whole = path.stat().st_size
        log.emit("message", 2, message="torn")
    content = path.read_bytes()
    for size in range(whole + 1, len(content)):
        path.write_bytes(content[:size])
        assert [event["step"] for event in read_events(path)] == [1]
        sink = Recorder()
        with EventLog(path, sinks=[sink]) as log:
            log.emit("message", 2, message="again")
        kept, warning, again = read_events(path)
        assert kept["message"] == "kept"
        assert warning["message"] == f"cut {size - whole} bytes of an incomplete last line"
        assert again["step"] == 2
        assert sink.events == [warning, again]


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"{}x\n", b"\0\0\n\0\n", b"7\n", b"y" * 200_000])
def test_rubbish_after_the_last_event_is_cut(tmp_path, tail):
    path = tmp_path / "events.jsonl"
    line = b'{"kind":"message"}\n' * 3
    path.write_bytes(line + tail)
    assert cut_torn_tail(path) == len(tail)
    assert path.read_bytes() == line
    assert cut_torn_tail(path) == 0
    path.write_bytes(tail)
    assert cut_torn_tail(path) == len(tail)


def test_a_full_disk_loses_no_event_and_stops_nothing(tmp_path, monkeypatch):
    real, room = os.write, 700
    sink = Recorder()
    path = tmp_path / "events.jsonl"
    log = EventLog(path, sinks=[sink])

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, bytes(data)[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write)
    for number in range(1, 31):
        log.emit("message", number, message="x" * 50)
    assert len([event for event in sink.events if event["kind"] == "warning"]) == 1
    room = 10**9
    log.emit("message", 31, message="last")
    log.close()
    assert [event["step"] for event in read_events(path)] == list(range(1, 32))


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_come_back_exactly(numbers):
    event = checked_event("message", time=0.1, rank=0, step=0, fields={"message": "", "n": numbers})
    assert json.loads(json.dumps(event, allow_nan=False))["n"] == numbers


def test_what_json_cannot_say_is_null_and_named():
    fields = examples.step(1, loss=float("nan"), gradient_norm=float("inf"))
    event = checked_event("step", time=0.0, rank=0, step=1, fields=fields)
    assert event["loss"] is None
    assert event["nonfinite"] == {"loss": "nan", "gradient_norm": "inf"}
    json.dumps(event, allow_nan=False)


def test_scalars_of_numpy_and_torch_become_plain_numbers_and_other_objects_are_refused():
    import numpy
    import torch

    fields = examples.step(1, loss=torch.tensor(0.1, dtype=torch.float64), tokens=numpy.int64(7))
    event = checked_event("step", time=0.0, rank=0, step=1, fields=fields)
    assert (event["loss"], event["tokens"]) == (0.1, 7)
    assert type(event["tokens"]) is int
    with pytest.raises(TypeError, match="note"):
        checked_event("message", time=0.0, rank=0, step=0, fields={"message": "", "note": object()})


def test_events_that_break_the_contract_are_refused(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="unknown event kind 'stepp'; nearest: step"):
        log.emit("stepp", 1)
    with pytest.raises(ValueError, match="lacks bits_per_byte, tokens"):
        log.emit("validation", 1, name="validation", loss=1.0)
    with pytest.raises(ValueError, match="may not set rank"):
        log.emit("message", 1, message="", rank=3)
    with pytest.raises(ValueError, match="state 'done'"):
        log.emit("checkpoint", 1, **examples.checkpoint("done"))
    log.close()
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_a_failing_sink_is_dropped_with_one_warning_and_the_others_go_on(tmp_path):
    good, bad = Recorder(), Recorder(fails_at=1)
    with EventLog(tmp_path / "events.jsonl", sinks=[bad, good]) as log:
        for number in range(1, 5):
            log.emit("message", number, message="m")
    kinds = [event["kind"] for event in read_events(tmp_path / "events.jsonl")]
    assert kinds == ["message", "message", "warning", "message", "message"]
    assert len(good.events) == 5
    assert good.closed
    assert not bad.closed
    warning = next(event for event in good.events if event["kind"] == "warning")
    assert "Recorder failed" in warning["message"]
    assert "no route" in warning["message"]


def test_a_silent_log_checks_events_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = EventLog.silent(rank=3)
    assert log.emit("message", 5, message="m")["rank"] == 3
    with pytest.raises(ValueError):
        log.emit("message", 5)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_broken_line_before_the_last_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\nnot json\n{"a":2}\n')
    with pytest.raises(RunError, match=r"events.jsonl, line 2: not an event"):
        list(read_events(path))


def test_the_page_on_events_has_every_kind_and_field_and_the_version():
    page = (DOCS / "events.md").read_text()
    assert f"version {schema.SCHEMA_VERSION}" in page
    for kind, required in schema.REQUIRED.items():
        section = re.search(rf"^## `{kind}`.*?(?=^## |\Z)", page, re.M | re.S)
        assert section, kind
        for name in (*required, *schema.OPTIONAL.get(kind, ())):
            assert f"| `{name}` |" in section[0], (kind, name)
    for name in schema.COMMON:
        assert f"| `{name}` |" in page
