"""One run at a time in a folder."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from armillary.foundation.errors import UserError
from armillary.resilience import claim as claim_module
from armillary.resilience.claim import claim_checkpoints, claim_run

_HOLDER = (
    "import sys\nfrom pathlib import Path\n"
    "from armillary.resilience.claim import claim_run\n"
    "claim = claim_run(Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()\n"
)


def test_a_second_process_is_told_who_holds_the_folder_until_that_one_dies(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for _ in range(2):  # being refused does not damage what the holder wrote
            with pytest.raises(UserError) as error:
                claim_run(run)
            assert f"in use by process {holder.pid} on {socket.gethostname()}" in str(error.value)
        holder.kill()
    with claim_run(run) as claim:  # the claim died with its process; a folder of locks is empty
        assert claim.folder == run
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} "):
            claim_run(run)
    claim_run(run).release()


def test_only_new_empty_and_run_folders_are_taken_and_others_stay_as_they_are(
    tmp_path: Path,
) -> None:
    for known in ("recipe.toml", "events.jsonl"):
        run = tmp_path / known.replace(".", "-")
        run.mkdir()
        (run / known).touch()
        (run / "checkpoints").mkdir()
        claim_run(run).release()
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.tex").write_text("words")
    with pytest.raises(UserError, match=r"something other than a run \(chapter.tex\)"):
        claim_run(foreign)
    assert [entry.name for entry in foreign.iterdir()] == ["chapter.tex"]
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=f"run folder {file} is a file"):
        claim_run(file)
    with pytest.raises(UserError, match="cannot be written to"):
        claim_run(file / "below")


def test_a_folder_that_cannot_be_written_to_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> Any:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    for number in (errno.EROFS, errno.EACCES):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", refuse(number))
            with pytest.raises(UserError, match=rf"cannot be written to \({os.strerror(number)}\)"):
                claim_run(tmp_path / "run")
    for number, words in ((errno.EROFS, "Read-only"), (errno.ENOSPC, "no space left")):
        with monkeypatch.context() as patch:
            patch.setattr(claim_module, "write_atomically", refuse(number))
            with pytest.raises(UserError, match=words):
                claim_run(tmp_path / "run")
    claim_run(tmp_path / "run").release()  # what failed half-way has not kept the lock


def test_a_folder_of_checkpoints_elsewhere_is_held_by_one_run_whatever_it_holds(
    tmp_path: Path,
) -> None:
    (tmp_path / "step-00000010").mkdir()
    words = rf"(?s)checkpoints folder {tmp_path} is in use by process {os.getpid()}.*folder DIR"
    with claim_checkpoints(tmp_path), pytest.raises(UserError, match=words):
        claim_checkpoints(tmp_path)
    claim_checkpoints(tmp_path).release()
