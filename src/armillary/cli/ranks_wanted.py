"""The options that say how many ranks a command has, and where: the same for all such commands."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from armillary.cli.parser import Parser
from armillary.foundation.errors import Problem
from armillary.launch.place import Place


@dataclass(frozen=True, slots=True)
class RanksWanted:
    """What was asked for, here or by whoever started this process as a rank."""

    nproc: int
    """Ranks to start on this machine."""
    place: Place
    """This machine among those of the run."""
    world_size: int
    """Ranks of the whole run."""
    started: bool
    """Whether this process is to be a rank itself: the only one, or one that was started."""
    idle_meeting: str = ""
    """A `--meet` without the `--nodes` that would use it."""

    def problems(self) -> list[Problem]:
        """What is wrong with the options; a rank need not look, as its launcher did."""
        found = []
        if self.nproc < 1:
            found.append(Problem(f"--nproc {self.nproc}", allowed="1 or more", fix="--nproc 1"))
        found += self.place.problems()
        if self.idle_meeting and not found:
            found.append(
                Problem(
                    f"--meet {self.idle_meeting} without --nodes: there is nobody to meet",
                    "both, or neither",
                    "--nodes N with the number of machines",
                )
            )
        return found


def add_arguments(parser: Parser) -> None:
    """Declares `--nproc`, `--nodes`, `--node-rank` and `--meet`."""
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="ranks to start on this machine (default: 1)"
    )
    parser.add_argument("--nodes", metavar="N", type=int, help="machines of the run (default: 1)")
    parser.add_argument(
        "--node-rank", metavar="N", type=int, default=0, help="number of this machine, from 0"
    )
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        default="",
        help="where machine 0 listens for the ranks of all; the same on each machine",
    )


def ranks_wanted(arguments: argparse.Namespace) -> RanksWanted:
    """Reads the options, and the environment of a process that was started as a rank."""
    if "RANK" in os.environ:
        return RanksWanted(1, Place(), int(os.environ.get("WORLD_SIZE", "1")), True)
    nodes = 1 if arguments.nodes is None else int(arguments.nodes)
    idle_meeting = arguments.meet if arguments.nodes is None else ""
    place = Place(nodes=nodes, node=arguments.node_rank, meeting=arguments.meet)
    if arguments.nproc is None and place.nodes == 1:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return RanksWanted(1, place, world_size, True, idle_meeting)
    nproc = 1 if arguments.nproc is None else int(arguments.nproc)
    world_size = nproc * place.nodes
    return RanksWanted(nproc, place, world_size, world_size == 1, idle_meeting)
