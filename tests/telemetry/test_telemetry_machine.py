import errno
import os

import pytest
import torch

import telemetry_examples as examples
from armillary.foundation.progress import NoProgress
from armillary.telemetry.machine import hardware, host, measure, software
from armillary.telemetry.machine.examine import examine
from armillary.telemetry.machine.finding import finding

CPU = torch.device("cpu")


def test_the_best_of_several_tries_counts_and_the_first_does_not():
    clock = examples.Ticks(0.0)
    durations = iter([9.0, 3.0, 2.0, 4.0])

    def act():
        clock.now += next(durations)

    assert measure.best_seconds(act, 8.5, clock=clock) == 2.0


def test_rates_count_operations_and_bytes_as_documented(monkeypatch):
    monkeypatch.setattr(measure, "best_seconds", lambda *_: 0.5)
    assert measure.matrix_product_flops(torch.float32, CPU, 0.0, [8, 16]) == 2 * 16**3 / 0.5
    rates = measure.memory_bandwidth(CPU, 0.0, 4096)
    assert rates == {"copy": 2 * 4096 / 0.5, "triad": 3 * 4096 / 0.5}


def test_the_disk_measurement_leaves_nothing_behind(tmp_path, monkeypatch):
    assert measure.disk_write_rate(tmp_path, 2**20) > 0
    assert list(tmp_path.iterdir()) == []

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    found = hardware.disk_finding("cache", tmp_path / "absent", "use another", quick=True)
    assert (found.verdict, found.advice) == ("fail", "use another")
    assert "No space left" in found.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.10.1", "warn"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "warn"), ("x", "warn")],
)
def test_the_versions_of_torch_that_are_tested_are_ok(version, verdict):
    assert software.torch_finding(version).verdict == verdict


def test_little_memory_and_a_missing_compiler_come_with_what_to_do(monkeypatch):
    monkeypatch.setattr(hardware, "memory_bytes", lambda: (8 * 2**30, 2**30))
    assert hardware.memory_finding().verdict == "warn"
    monkeypatch.setattr(hardware, "memory_bytes", lambda: None)
    assert hardware.memory_finding().verdict == "ok"
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "apt install g++" in software.compiler_finding().advice


def test_the_peaks_for_utilisation_are_stored_and_slow_bfloat16_is_advised_against(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware, "compute_device", lambda: CPU)
    rates = {torch.float32: 1e11, torch.bfloat16: 4e10}
    monkeypatch.setattr(hardware, "matrix_product_flops", lambda dtype, *_: rates[dtype])
    found = hardware.matrix_finding(quick=True)
    assert found.advice == "bf16 is slower than fp32 here: --precision.compute float32"
    assert found.text.startswith("fp32 100 GFLOP/s, bf16 40 GFLOP/s")
    assert (tmp_path / "peaks.json").exists()


def test_a_look_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch):
    def broken():
        raise RuntimeError("driver")

    for name in ("torch_finding", "device_findings"):
        monkeypatch.setattr(software, name, broken)
    for name in ("memory_finding", "disk_finding", "bandwidth_finding", "matrix_finding"):
        monkeypatch.setattr(hardware, name, lambda *_, **__: finding("other", "fine"))
    found = list(examine(quick=True, progress=NoProgress()))
    assert [each.verdict for each in found].count("warn") >= 2
    assert found[0].text == "could not be examined: RuntimeError('driver')"
    assert found[-1].text == "fine"


def test_facts_of_the_host_are_read_or_absent_but_never_invented(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2\nmodel name\t: B\n"
    )
    assert host._colon_file(file)["model name"] == "Some CPU"
    assert host._colon_file(tmp_path / "absent") == {}
    sizes = host.memory_bytes()
    assert sizes is None or 0 < sizes[1] <= sizes[0]
    monkeypatch.setattr(host, "_colon_file", lambda path: {})
    assert host.memory_bytes() is None
    assert host.cpu_flags() == frozenset()
    assert host.peak_resident_bytes() > 2**20
