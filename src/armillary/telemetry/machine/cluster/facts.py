"""What each rank says of itself, and what is odd when all of them are put side by side."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from armillary.foundation.machine import available_cores
from armillary.foundation.secrets import names_a_secret, without_secrets
from armillary.telemetry.format import byte_count, count_of, flop_rate
from armillary.telemetry.machine.finding import Finding, finding
from armillary.telemetry.machine.measure import matrix_product_flops
from armillary.version import __version__

_PACKAGES = ("numpy", "safetensors", "tokenizers", "triton")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "UCX_", "FI_")
_EACH_ITS_OWN = ("CUDA_VISIBLE_DEVICES",)
_FILES_OF_A_RANK, _FILES_BESIDE = 6, 1_024
"""Connections to each other rank, over the groups of a run, and whatever else is open."""
_SHARED_MEMORY = {"cuda": 2**30, "cpu": 2**26}
_FAR_BEHIND = 0.8
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One rank."""

    host: str = ""
    """Name of its machine."""
    device: str = ""
    """Name of its GPU, or `cpu`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, what changes how ranks compute or talk; no secrets."""
    open_files: int = 0
    """Most files and connections that it may have open."""
    locked_bytes: int | None = None
    """Most memory that it may lock, where it has InfiniBand; None: without limit, or without."""
    shared_bytes: int = 0
    """Free in /dev/shm."""
    cores: int = 0
    """That it may use."""
    flops: float = 0.0
    """FLOP/s of its matrix products while all ranks compute."""


def facts_of(device: torch.device, *, quick: bool) -> RankFacts:
    """This rank's own."""
    versions = {"armillary": __version__, "python": platform.python_version()}
    versions["torch"] = torch.__version__
    if device.type == "cuda":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limited = Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY
    memory = Path("/dev/shm")
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    sizes = (512,) if device.type == "cpu" else (4096,)
    return RankFacts(
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        versions=versions,
        variables={
            name: without_secrets(value)
            for name, value in os.environ.items()
            if name.startswith(_PREFIXES) and name not in _EACH_ITS_OWN and not names_a_secret(name)
        },
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=locked if limited else None,
        shared_bytes=shutil.disk_usage(memory).free if memory.is_dir() else 0,
        cores=available_cores(),
        flops=matrix_product_flops(kind, device, 0.1 if quick else 0.5, sizes),
    )


def compare(facts: Sequence[RankFacts]) -> list[Finding]:
    """What all ranks are, and where they differ."""
    return [
        _ranks(facts),
        *_versions(facts),
        _variables(facts),
        _open_files(facts),
        *_memory(facts),
        _products(facts),
    ]


def _ranks(facts: Sequence[RankFacts]) -> Finding:
    each = Counter(fact.host for fact in facts)
    devices = Counter(fact.device for fact in facts)
    advice = ""
    if len(devices) > 1:
        advice = "devices differ, and the slowest sets the pace: take machines that are alike"
    elif len(set(each.values())) > 1:
        fewest = min(each, key=lambda host: each[host])
        advice = f"{fewest} has fewer ranks than others: start as many on each machine"
    kinds = " and ".join(f"{count} x {name}" for name, count in devices.items())
    text = f"{count_of(len(facts), 'rank')} on {count_of(len(each), 'host')}: {kinds}"
    return finding("ranks", text, advice, hosts=dict(each), devices=dict(devices))


def _versions(facts: Sequence[RankFacts]) -> list[Finding]:
    differing = _differing([fact.versions for fact in facts])
    if not differing:
        versions = dict(facts[0].versions)
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        return [finding("versions", f"equal on all ranks: {text}", versions=versions)]
    return [
        finding(
            "versions",
            f"{name} differs: {_who_has_what(facts, groups)}",
            "install the same everywhere; the ranks would not compute the same",
            verdict="fail",
            package=name,
            ranks=groups,
        )
        for name, groups in differing.items()
    ]


def _variables(facts: Sequence[RankFacts]) -> Finding:
    differing = _differing([fact.variables for fact in facts])
    if not differing:
        shown = " ".join(f"{name}={value}" for name, value in sorted(facts[0].variables.items()))
        return finding("variables", f"equal on all ranks: {shown or 'none set'}")
    text = "; ".join(
        f"{name}: {_who_has_what(facts, groups)}" for name, groups in differing.items()
    )
    return finding("variables", text, "set the same on each machine", ranks=differing)


def _open_files(facts: Sequence[RankFacts]) -> Finding:
    wanted = _FILES_OF_A_RANK * len(facts) + _FILES_BESIDE
    rank = min(range(len(facts)), key=lambda each: facts[each].open_files)
    least = facts[rank].open_files
    advice = "" if least >= wanted else f"`ulimit -n {wanted}` or more, where ranks are started"
    text = f"{least} at least (rank {rank}, {facts[rank].host}), {wanted} wanted"
    return finding("open files", text, advice, limit=least, wanted=wanted)


def _memory(facts: Sequence[RankFacts]) -> list[Finding]:
    rank = min(range(len(facts)), key=lambda each: facts[each].shared_bytes)
    least = facts[rank].shared_bytes
    wanted = _SHARED_MEMORY["cpu" if facts[rank].device == "cpu" else "cuda"]
    advice = ""
    if least < wanted:
        advice = f"ranks talk through it: give containers {byte_count(wanted)} (--shm-size)"
    text = f"{byte_count(least)} free at least (rank {rank}, {facts[rank].host})"
    found = [finding("/dev/shm", text, advice, free_bytes=least)]
    locked = {rank: fact.locked_bytes for rank, fact in enumerate(facts) if fact.locked_bytes}
    if locked:
        text = f"{_named(locked, facts)}: limited, and there is InfiniBand"
        found.append(finding("locked", text, "`ulimit -l unlimited`, or InfiniBand cannot be used"))
    return found


def _products(facts: Sequence[RankFacts]) -> Finding:
    rates = [fact.flops for fact in facts]
    middle = statistics.median(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < _FAR_BEHIND * middle]
    text = f"{flop_rate(min(rates))} to {flop_rate(max(rates))}, median {flop_rate(middle)}"
    advice = ""
    if slow:
        advice = f"every step waits for {_named(slow, facts)}: hot, shared or faulty?"
    return finding("products", text, advice, slow_ranks=slow, flops=rates)


def _differing(each: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Name -> value -> ranks, of the names whose values differ."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in sorted(set().union(*each)):
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, values in enumerate(each):
            groups[values.get(name, "none")].append(rank)
        if len(groups) > 1:
            found[name] = dict(groups)
    return found


def _who_has_what(facts: Sequence[RankFacts], groups: Mapping[str, Sequence[int]]) -> str:
    """The values with their ranks; those of most ranks without."""
    most = max(groups.values(), key=len)
    parts = [
        f"{value} on {'the others' if ranks is most else _named(ranks, facts)}"
        for value, ranks in sorted(groups.items(), key=lambda group: len(group[1]))
    ]
    return ", ".join(parts)


def _named(ranks: Sequence[int] | Mapping[int, object], facts: Sequence[RankFacts]) -> str:
    names = [f"rank {rank} ({facts[rank].host})" for rank in ranks]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
