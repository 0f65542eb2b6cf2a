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
from armillary.telemetry.events import EventLog, read_events
from armillary.telemetry.line_file import LineFile, cut_torn_tail
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


class FailingDisk:
    """Takes so many more bytes, then fails, until it is given more room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, number: int) -> None:
        self.room, self._number, self._real = room, number, os.write
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, descriptor: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(self._number, os.strerror(self._number))
        written = self._real(descriptor, bytes(data)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_loses_no_event_and_stops_nothing(tmp_path, monkeypatch, number):
    sink = Recorder()
    path = tmp_path / "events.jsonl"
    log = EventLog(path, sinks=[sink])
    disk = FailingDisk(monkeypatch, 700, number)
    for step in range(1, 31):
        log.emit("message", step, message="x" * 50)
    (told,) = [event for event in sink.events if event["kind"] == "warning"]
    assert os.strerror(number) in told["message"]
    disk.room = 10**9
    log.emit("message", 31, message="last")
    log.close()
    written = list(read_events(path))
    assert [e["step"] for e in written if e["kind"] == "message"] == list(range(1, 32))
    assert [e for e in written if e["kind"] == "warning"] == [told]
    assert [e["step"] for e in written] == sorted(e["step"] for e in written)


def test_a_log_whose_disk_comes_back_at_the_end_has_its_stop_event(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    disk = FailingDisk(monkeypatch, 10, errno.ENOSPC)
    log.emit("stop", 4, reason="finished", exit_code=0)
    assert list(read_events(path)) == []

    def mend(_: float) -> None:
        disk.room = 10**6

    monkeypatch.setattr("time.sleep", mend)
    log.close()
    assert [event["kind"] for event in read_events(path)] == ["stop", "warning"]


def test_a_log_whose_disk_never_comes_back_ends_with_words(tmp_path, monkeypatch, capsys):
    log = EventLog(tmp_path / "events.jsonl", patience_seconds=0)
    FailingDisk(monkeypatch, 0, errno.EROFS)
    log.emit("message", 1, message="lost")
    log.close()
    told = capsys.readouterr().err
    assert "2 events could not be written" in told and "Read-only file system" in told


def test_a_mount_that_comes_back_is_opened_anew(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    log = EventLog(path)
    log.emit("message", 1, message="before")
    path.parent.rename(tmp_path / "away")
    os.close(log._file._descriptor)  # what a lost mount makes of it
    path.parent.mkdir()  # the empty mount point
    log.emit("message", 2, message="meanwhile")
    assert not path.exists(), "another log would be hidden once the disk is back"
    path.parent.rmdir()
    (tmp_path / "away").rename(path.parent)
    log.emit("message", 3, message="after")
    log.close()
    events = list(read_events(path))
    assert [e["step"] for e in events if e["kind"] == "message"] == [1, 2, 3]


def test_what_waits_is_bounded_steps_go_first_and_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log._file._room = 4000
    disk = FailingDisk(monkeypatch, 5, errno.ENOSPC)
    log.emit("message", 0, message="first, of which a part is written")
    for step in range(1, 40):
        log.emit("step", step, **examples.step(step))
        if step % 10 == 0:
            log.emit("validation", step, name="v", loss=1.0, bits_per_byte=1.0, tokens=1)
    assert log._file._waiting_bytes <= 4000 + 600
    disk.room = 10**6
    log.emit("stop", 40, reason="finished", exit_code=0)
    log.close()
    events = list(read_events(path))
    assert [e["step"] for e in events if e["kind"] == "validation"] == [10, 20, 30]
    assert [e["kind"] for e in events if e["kind"] in ("message", "stop")] == ["message", "stop"]
    kept = [e["step"] for e in events if e["kind"] == "step"]
    assert kept == list(range(40 - len(kept), 40))
    told = next(e["message"] for e in events if "missing" in e.get("message", ""))
    assert told.startswith(f"{39 - len(kept)} events are missing")


def test_a_line_longer_than_the_room_is_still_written(tmp_path):
    file = LineFile(tmp_path / "log", room=10)
    assert file.append(b'{"a": "' + b"x" * 100 + b'"}\n')
    assert file.close(0) == 0


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
