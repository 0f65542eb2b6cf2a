"""Tell replica groups who of them is there: `armillary lighthouse`. One for each training.

It keeps nothing: when it ends, groups wait until it is there again.
"""

from __future__ import annotations

import argparse
import sys
import time

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED, Problem, RunError, UserError
from armillary.parallel.replicas.config import address

_LOOK_SECONDS = 0.2
_LONGEST = 1_000_000  # seconds


def add_arguments(parser: Parser) -> None:
    """Declares the command's own options."""
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:29510",
        help="where groups reach it; port 0 takes a free one (default: 127.0.0.1:29510, which is"
        " this machine alone; whoever reaches it can disturb the training)",
    )
    parser.add_argument(
        "--least", metavar="N", type=int, default=1, help="groups to begin with (default: 1)"
    )
    parser.add_argument(
        "--join-seconds",
        metavar="S",
        type=float,
        default=60.0,
        help="how long groups that are ready wait for others that are alive (default: 60)",
    )
    parser.add_argument(
        "--silent-seconds",
        metavar="S",
        type=float,
        default=5.0,
        help="after which a group without a sign of life is gone (default: 5)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is asked to stop.

    Raises:
        UserError: an option is out of range, or torchft is not installed.
        RunError: it cannot listen there.
    """
    from armillary.parallel.replicas.lighthouse import Lighthouse
    from armillary.resilience.signals import StopRequest

    if found := _problems(arguments):
        raise UserError(found)
    with StopRequest() as stop:
        try:
            lighthouse = Lighthouse(
                arguments.listen,
                least=arguments.least,
                join_seconds=arguments.join_seconds,
                silent_seconds=arguments.silent_seconds,
            )
        except RuntimeError as error:
            problem = Problem(
                f"cannot listen at {arguments.listen}: {error}", fix="another --listen HOST:PORT"
            )
            raise RunError(problem) from error
        host = arguments.listen.rpartition(":")[0]
        print(f"lighthouse at {host}:{lighthouse.port}", file=sys.stderr, flush=True)
        while not stop.requested:
            time.sleep(_LOOK_SECONDS)
        lighthouse.close()
    return EXIT_FINISHED


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    found = []
    host, _, port = arguments.listen.rpartition(":")
    if address(arguments.listen) is None and not (host and port == "0"):
        found.append(
            Problem(
                f"--listen {arguments.listen} is no address", "HOST:PORT", "--listen 127.0.0.1:0"
            )
        )
    if arguments.least < 1:
        found.append(Problem(f"--least {arguments.least}", "1 or more", "--least 1"))
    for name in ("join_seconds", "silent_seconds"):
        if not 0 < (seconds := getattr(arguments, name)) <= _LONGEST:
            option = f"--{name.replace('_', '-')}"
            allowed = f"above 0, at most {_LONGEST}"
            found.append(Problem(f"{option} {seconds}", allowed, f"{option} 10"))
    return found
