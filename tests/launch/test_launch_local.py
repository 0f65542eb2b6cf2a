"""Ranks on this machine, as tiny scripts that load no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from armillary.foundation.tell import WORDS_VARIABLE
from armillary.launch.local import launch

PYTHON = (sys.executable, "-S", "-c")


def run(script: str, nproc: int, grace_seconds: float = 30.0) -> int:
    prelude = "import os, sys, time, signal; rank = int(os.environ['RANK'])\n"
    return launch([prelude + script], nproc, program=PYTHON, grace_seconds=grace_seconds)


def test_each_rank_knows_its_place_and_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    script = f"""
text = " ".join(os.environ[name] for name in {names.split()})
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(text)
print("out of", rank); print("err of", rank, file=sys.stderr)
"""
    assert run(script, 2) == 0
    rows = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, row in enumerate(rows):
        assert row == [str(rank), "2", "2", "127.0.0.1", rows[0][4], threads]
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out of 0\n", "err of 0\n")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit(75 if rank else 0)", 75),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", 128 + 9),
        ("sys.exit(2 if rank == 1 else 0)", 2),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3) if rank else time.sleep(60)", 128 + 37),
    ],
)
def test_the_exit_code_is_75_if_no_rank_failed_and_the_failed_ranks_code_otherwise(
    script: str, code: int
) -> None:
    assert run(script, 2) == code


SAY = f"""
def fail(text, code):
    open(os.environ[{WORDS_VARIABLE!r}], "a").write(text + "\\n"); sys.exit(code)
def after_rank_2():
    while not os.path.exists(os.path.dirname(os.environ[{WORDS_VARIABLE!r}]) + "/2"):
        time.sleep(0.01)
    time.sleep(0.05)  # times of files are kept to a few milliseconds
"""


@pytest.mark.parametrize(
    ("script", "code", "shown"),
    [
        ("fail('error: no such recipe', 2)", 2, "error: no such recipe\n"),
        (
            "fail('error: no GPU', 2) if rank == 1 else time.sleep(60)",
            2,
            "error: rank 1 failed with exit code 2\nerror: no GPU\n",
        ),
        (
            "fail('error: disk on fire', 7) if rank == 2 else after_rank_2(); fail('lost', 1)",
            7,
            "error: rank 2 failed with exit code 7\nerror: disk on fire\n",
        ),
        ("sys.exit(130)", 130, ""),
    ],
    ids=["all see it", "one sees it", "others fail of it", "people ended it"],
)
def test_why_ranks_failed_is_told_once(
    script: str, code: int, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(SAY + script, 3, grace_seconds=0.3) == code
    assert capfd.readouterr().err == shown


def test_a_failing_rank_is_shown_and_ends_the_others_even_stubborn_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"""
deaf = {str(tmp_path / "deaf")!r}
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(deaf, "w").close()
if rank != 1:
    time.sleep(60)
while not os.path.exists(deaf):
    pass
print("disk on fire", file=sys.stderr)
sys.exit(7)
"""
    assert run(script, 3, grace_seconds=0.3) == 7
    shown = capfd.readouterr()
    assert shown.err == "error: rank 1 failed with exit code 7\ndisk on fire\n"


def test_ranks_that_one_has_left_on_request_are_asked_to_stop_too() -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
sys.exit(75) if rank else time.sleep(60)
sys.exit(7)
"""
    assert run(script, 2, grace_seconds=0.5) == 75


LAUNCHER = """
import sys
from armillary.launch.local import launch
assert "torch" not in sys.modules
script = '''
import os, signal, sys, time
name = sys.argv[1] + "/" + os.environ["RANK"]
def note(number, frame):
    with open(name, "a") as file: file.write(signal.Signals(number).name + " ")
    if number in (signal.SIGINT, signal.SIGTERM): sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN: signal.signal(number, note)
open(name + ".ready", "w").close()
for _ in range(600): time.sleep(0.05)
'''
sys.exit(launch([script, sys.argv[1]], 2, program=(sys.executable, "-S", "-c")))
"""


def started(folder: Path, *before: str) -> subprocess.Popen[str]:
    """A launcher in a process group of its own, as under a terminal, with both ranks ready."""
    command = [*before, sys.executable, "-c", LAUNCHER, str(folder)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    while not all((folder / f"{rank}.ready").exists() for rank in range(2)):
        assert launcher.poll() is None
    return launcher


def heard(folder: Path, rank: int) -> str:
    """The signals that a rank has noted."""
    note = folder / str(rank)
    return note.read_text() if note.exists() else ""


def test_each_signal_reaches_every_rank_once(tmp_path: Path) -> None:
    with started(tmp_path) as launcher:
        launcher.send_signal(signal.SIGUSR1)
        while not all(heard(tmp_path, rank) == "SIGUSR1 " for rank in range(2)):
            assert launcher.poll() is None
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        assert launcher.wait(30) == 75
    for rank in range(2):
        assert heard(tmp_path, rank) == "SIGUSR1 SIGINT "


def test_the_loss_of_a_terminal_reaches_every_rank_once_and_however_often_kills_none(
    tmp_path: Path,
) -> None:
    with started(tmp_path, "env", "--default-signal=HUP") as launcher:
        for times in (1, 2, 3):  # by the system, by a shell
            os.killpg(launcher.pid, signal.SIGHUP)
            while not all(heard(tmp_path, rank) == "SIGHUP " * times for rank in range(2)):
                assert launcher.poll() is None
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 75


def test_under_nohup_neither_the_launcher_nor_its_ranks_hear_of_the_loss(tmp_path: Path) -> None:
    with started(tmp_path, "nohup") as launcher:
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        for pid in (launcher.pid, *map(int, ranks.read_text().split())):
            os.kill(pid, signal.SIGHUP)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 75
    assert [heard(tmp_path, rank) for rank in range(2)] == ["SIGTERM "] * 2


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_ranks_stop_on_request_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as launcher:
        launcher.kill()
        assert launcher.stdout is not None
        launcher.stdout.read()  # ends when rank 0, which holds the other end, has ended
    assert heard(tmp_path, 0) == "SIGTERM "
