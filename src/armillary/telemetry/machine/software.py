"""What is installed: torch, backends, a compiler, optional libraries."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil

import torch

from armillary.foundation.machine import available_cores
from armillary.telemetry.devices import device_peak_flops
from armillary.telemetry.format import byte_count, flop_rate
from armillary.telemetry.machine.finding import Finding, finding
from armillary.telemetry.machine.host import cpu_flags, cpu_model

_OLDEST, _TOO_NEW = (2, 11), (2, 14)
_EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "parquet": "pyarrow", "hub": "datasets"}


def torch_finding(version: str = torch.__version__) -> Finding:
    """Whether this torch is one that Armillary is tested with."""
    match = re.match(r"(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in match.groups()) if match else (0, 0)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    text = f"{version} ({build}), Python {platform.python_version()}"
    advice = "" if _OLDEST <= numbers < _TOO_NEW else 'pip install "torch>=2.11,<2.14"'
    return finding("torch", text, advice, version=version, build=build)


def cpu_finding() -> Finding:
    """The CPU, its cores, and the extensions that speed products up."""
    flags = cpu_flags()
    useful = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    cores, threads = available_cores(), torch.get_num_threads()
    text = f"{cpu_model()}, {cores} cores, {threads} threads, {' '.join(useful) or 'no AVX'}"
    advice = ""
    if threads < cores and "OMP_NUM_THREADS" not in os.environ:
        advice = f"torch uses {threads} of {cores} cores; set OMP_NUM_THREADS={cores}"
    return finding(
        "cpu",
        text,
        advice,
        model=cpu_model(),
        cores=cores,
        threads=threads,
        extensions=useful,
        torch_capability=torch.backends.cpu.get_cpu_capability(),
    )


def device_findings() -> list[Finding]:
    """Each GPU, with its memory and whether its peak is known; a line when there is none."""
    if torch.cuda.is_available():
        return [_gpu_finding(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return [finding("device", "Apple GPU (mps); training here uses the CPU", backend="mps")]
    if torch.version.cuda or torch.version.hip:
        advice = "this torch was built for GPUs; check the driver with nvidia-smi or rocm-smi"
        return [finding("device", "no GPU found; training uses the CPU", advice, backend="cpu")]
    return [finding("device", "no GPU; training uses the CPU", backend="cpu")]


def _gpu_finding(device: torch.device) -> Finding:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    peak = device_peak_flops(device, torch.bfloat16)
    rate = "peak unknown" if peak is None else f"{flop_rate(peak)} bf16 dense"
    advice = ""
    if peak is None:
        advice = "no MFU without a peak: --telemetry.peak-flops with the figure of its data sheet"
    return finding(
        f"device {device.index}",
        f"{properties.name}, {byte_count(total)}, {byte_count(free)} free, {rate}",
        advice,
        backend="cuda",
        name=properties.name,
        memory_bytes=total,
        memory_free_bytes=free,
        peak_flops=peak,
        processors=properties.multi_processor_count,
    )


def distributed_finding() -> Finding:
    """Which collective libraries this torch has."""
    if not torch.distributed.is_available():
        return finding(
            "distributed", "this torch has none", "one process only; install another build of torch"
        )
    backends = [
        name
        for name, there in (
            ("gloo", torch.distributed.is_gloo_available()),
            ("nccl", torch.distributed.is_nccl_available()),
            ("mpi", torch.distributed.is_mpi_available()),
        )
        if there
    ]
    advice = ""
    if torch.cuda.device_count() > 1 and "nccl" not in backends:
        advice = "several GPUs but no nccl: collectives would go through the CPU"
    return finding("distributed", " ".join(backends) or "none", advice, backends=backends)


def compiler_finding() -> Finding:
    """Whether `torch.compile` can work: a C++ compiler for CPUs, Triton for GPUs."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    found = next((path for name in wanted if name and (path := shutil.which(name))), None)
    triton = importlib.util.find_spec("triton") is not None
    if torch.cuda.is_available():
        advice = "" if triton else "compile needs triton: pip install triton"
        return finding("compiler", "triton" if triton else "no triton", advice, triton=triton)
    advice = "" if found else "--compile.enabled needs g++: apt install g++, or leave it off"
    return finding("compiler", found or "no C++ compiler", advice, path=found, triton=triton)


def extras_finding() -> Finding:
    """Which optional dependency groups are installed."""
    there = [name for name, module in _EXTRAS.items() if importlib.util.find_spec(module)]
    absent = [name for name in _EXTRAS if name not in there]
    text = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    return finding("extras", text, installed=there, absent=absent)
