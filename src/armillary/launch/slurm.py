"""A run as an sbatch script, which Slurm starts again when the run asks for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from armillary.foundation.errors import Problem
from armillary.launch.job import Job, a_word, exports, prepared, shown

_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}\Z", re.ASCII)
_LONGEST_WARNING = 65_535  # seconds, of --signal
_WRITTEN = {
    "job-name": "--name",
    "nodes": "--nodes",
    "ntasks": "--ranks-per-node",
    "ntasks-per-node": "--ranks-per-node",
    "gpus": "--gpus-per-node",
    "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-node",
    "exclusive": "--exclusive or --no-exclusive",
    "time": "--time",
    "signal": "--signal-seconds",
    "requeue": "--max-requeues",
    "no-requeue": "--max-requeues 0",
    "open-mode": "",
    "output": "--log",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
}
"""Options of sbatch that the job writes itself or that gainsay one; and the option to use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm(Job):
    """One task on each machine, which starts the ranks there.

    Slurm warns the script before the time is over, and srun passes the warning on; the run saves
    and ends with 75, and the job is put back into the queue. Other failures are met by starting the
    step again, inside the same job.
    """

    kind: ClassVar[str] = "slurm"
    suffix: ClassVar[str] = ".sbatch"

    time: str = "24:00:00"
    """limit of the job, as Slurm writes it: minutes, H:M:S, D-H"""
    partition: str = ""
    """to run in"""
    account: str = ""
    """to be charged"""
    qos: str = ""
    """quality of service"""
    constraint: str = ""
    """features that the machines must have"""
    cpus_per_node: int = 0
    """cores of each machine (default: as the cluster gives them)"""
    exclusive: bool = True
    """whether the machines are shared with nobody"""
    signal_seconds: int = 300
    """seconds before the limit at which the run is asked to save and stop"""
    max_requeues: int = 1_000
    """times that the job goes back into the queue"""
    image: str = ""
    """container to run in, by pyxis (`srun --container-image`)"""
    mounts: str = ""
    """folders that the container sees, SRC:DST,... (`srun --container-mounts`)"""
    log: str = ""
    """file for what the job says, appended to (default: NAME-%j.log)"""
    sbatch: tuple[str, ...] = ()
    """further option of sbatch without its dashes, such as reservation=big; may be repeated"""

    def problems(self) -> list[Problem]:
        """See `Job.problems`."""
        return [*super(Slurm, self).problems(), *self._own_problems()]

    def _own_problems(self) -> Iterator[Problem]:
        if not _TIME.match(self.time):
            yield Problem(f"--time {self.time!r}", "minutes, H:M:S, D-H:M:S", "--time 24:00:00")
        elif 0 < _seconds(self.time) <= self.signal_seconds:
            yield Problem(
                f"--time {self.time} is not above --signal-seconds {self.signal_seconds}: the run"
                " would be stopped as soon as it begins, again and again",
                allowed=f"above {self.signal_seconds} s",
                fix="a longer --time, or fewer --signal-seconds",
            )
        if not 1 <= self.signal_seconds <= _LONGEST_WARNING:
            yield Problem(
                f"--signal-seconds {self.signal_seconds}",
                f"1 to {_LONGEST_WARNING}",
                "--signal-seconds 300",
            )
        for field in ("cpus_per_node", "max_requeues"):
            if getattr(self, field) < 0:
                yield Problem(f"--{field.replace('_', '-')} {getattr(self, field)}", "0 or more")
        for field in ("partition", "account", "qos", "constraint", "log"):
            yield from a_word(field, getattr(self, field))
        for field in ("image", "mounts"):
            yield from shown(field, getattr(self, field))
        for each in self.sbatch:
            yield from a_word("sbatch", each)
            if not each[:1].isalpha():
                yield Problem(f"--sbatch {each!r}", "NAME or NAME=VALUE, without dashes")
            name = each.partition("=")[0]
            if (instead := _WRITTEN.get(name)) is not None:
                yield Problem(
                    f"--sbatch {each}: the job says itself what {name} is",
                    "options of sbatch that the job does not write",
                    instead or "leave it out",
                )

    def submission(self, file: str) -> list[str]:
        """See `Job.submission`."""
        return ["sbatch", file]

    def render(self) -> str:
        """See `Job.render`."""
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH --{each}" for each in self._directives()),
                "",
                "# Written by `armillary launch slurm`; run it with sbatch.",
                f"command=({shlex.join(self.command())})",
                *exports(self.variables),
                f"max_failures={self.max_restarts}",
                f"max_requeues={self.max_requeues}",
                f"start_node={shlex.quote(self._start_node())}",
                f"srun_options=({shlex.join(self._srun_options())})",
                _MEETING.format(port=self.port),
                _REST,
            ]
        )

    def _directives(self) -> Iterator[str]:
        yield f"job-name={self.name}"
        yield f"nodes={self.nodes}"
        yield "ntasks-per-node=1"
        if self.gpus_per_node:
            yield f"gpus-per-node={self.gpus_per_node}"
        if self.cpus_per_node:
            yield f"cpus-per-task={self.cpus_per_node}"
        if self.exclusive:
            yield "exclusive"
        yield f"time={self.time}"
        yield f"signal=B:USR1@{self.signal_seconds}"
        yield "requeue"
        yield "open-mode=append"
        yield f"output={self.log or f'{self.name}-%j.log'}"
        for field in ("partition", "account", "qos", "constraint"):
            if value := getattr(self, field):
                yield f"{field}={value}"
        yield from self.sbatch

    def _srun_options(self) -> list[str]:
        # A rank that failed must not have the others end with 75: they find out by themselves.
        options = ["--kill-on-bad-exit=0", f"--nodes={self.nodes}", "--ntasks-per-node=1"]
        if self.cpus_per_node:
            options.append(f"--cpus-per-task={self.cpus_per_node}")  # srun no longer inherits it
        if self.image:
            options.append(f"--container-image={self.image}")
        if self.mounts:
            options.append(f"--container-mounts={self.mounts}")
        return options

    def _start_node(self) -> str:
        start = 'exec "$@" --node-rank "$SLURM_NODEID" --meet "$MEET"'
        return "\n".join(prepared(self.setup, start))


def _seconds(time: str) -> int:
    """A limit as Slurm reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; 0: none."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, minutes, seconds = {
        (True, 1): (*parts, 0, 0),
        (True, 2): (*parts, 0),
        (False, 1): (0, *parts, 0),
        (False, 2): (0, *parts),
    }.get((bool(dash), len(parts)), tuple(parts))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


_MEETING = 'export MEET="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}"'

_REST = """\

asked=""
step=""
pass_on() { # as USR1 always: of TERM, srun would kill the ranks while they save
    asked=$1
    interrupted=1
    [ -z "$step" ] || kill -s USR1 "$step" 2>/dev/null
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

run_step() { # sets `code`
    srun "${srun_options[@]}" bash -c "$start_node" armillary-node "${command[@]}" &
    step=$!
    interrupted=1
    [ -z "$asked" ] || pass_on "$asked" # it came before there was a step
    while [ "$interrupted" = 1 ]; do # a signal ends `wait`, not the step
        interrupted=""
        wait "$step"
        code=$?
    done
}

put_back() {
    if [ "${asked:-USR1}" != USR1 ]; then # cancelled; a job that is preempted Slurm puts back
        echo "stopped with its state saved, as Slurm asked" >&2
    elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
        echo "stopped with its state saved; not put back after $max_requeues times" >&2
    else
        scontrol requeue "$SLURM_JOB_ID" && echo "stopped with its state saved; queued again" >&2
    fi
    exit 75
}

failures=0
while [ -z "$asked" ]; do
    run_step
    case $code in
        0) exit 0 ;;
        2) exit 2 ;; # wrong input: nothing to try again
        75) put_back ;;
    esac
    failures=$((failures + 1))
    if [ -n "$asked" ] || [ "$failures" -gt "$max_failures" ]; then
        echo "failed with exit code $code" >&2
        exit "$code"
    fi
    echo "failed with exit code $code; restart $failures of $max_failures" >&2
    sleep "${ARMILLARY_RESTART_SECONDS:-10}"
done
put_back
"""
