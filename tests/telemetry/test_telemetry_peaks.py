import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.telemetry import measured_peaks
from armillary.telemetry.devices import device_peak_flops
from armillary.telemetry.peaks import PEAKS, mfu, mfu_warning, peak_flops, row_name

# Device names as drivers report them, with the dense bfloat16 figure of the maker's sheet.
NAMED = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H20": 148e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1307.4e12,
    "AMD Instinct MI300X OAM": 1307.4e12,
}
UNKNOWN = [
    "cpu",
    "",
    "NVIDIA",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A10G",
    "NVIDIA A100X",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA H1000",
    "AMD Instinct MI300",
    "AMD EPYC",
]


@pytest.mark.parametrize(("name", "expected"), NAMED.items())
def test_a_device_has_the_peak_of_its_own_sheet(name, expected):
    assert peak_flops(name, "torch.bfloat16") == expected
    assert peak_flops(name.upper(), "bfloat16") == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_or_cut_down_device_has_no_peak_rather_than_a_similar_one(name):
    assert peak_flops(name, "bfloat16") is None


def test_a_device_with_other_processor_counts_than_its_sheet_has_no_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16", processors=132) == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16", processors=16) is None
    assert peak_flops("NVIDIA GB200", "bfloat16", processors=152) == 2500e12


def test_formats_that_a_device_lacks_or_nobody_knows_have_no_peak():
    assert peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8_e4m3fn") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "torch.float8_e4m3fn") == 1978e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "int8") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "source") is None


@pytest.mark.parametrize("row", PEAKS)
def test_every_row_names_its_source_and_has_the_ratios_of_dense_hardware(row):
    peak = PEAKS[row]
    assert row_name(row) == row
    assert peak.source
    half = peak.float16
    assert half is not None
    assert peak.bfloat16 in (None, half)
    if peak.tf32 is not None:
        assert half / 2.05 < peak.tf32 < half / 1.95
    if peak.float8 is not None:
        assert half * 1.95 < peak.float8 < half * 2.05
    assert peak.float32 is not None
    assert peak.float32 < half


@given(st.floats(1, 1e13), st.floats(1e-3, 1e9), st.one_of(st.none(), st.floats(-1, 1e18)))
def test_utilisation_is_a_share_or_nothing_and_never_above_one(flops, rate, peak):
    share = mfu(flops, rate, peak)
    assert share is None or 0 < share <= 1
    assert share is None or mfu_warning(flops, rate, peak) is None


def test_an_impossible_utilisation_is_none_and_is_explained():
    assert mfu(6e9, 5e4, 989e12) == pytest.approx(6e9 * 5e4 / 989e12, rel=1e-15)
    assert mfu(6e9, 5e5, 989e12) is None
    assert "303% of the assumed peak of 9.89e+14" in (mfu_warning(6e9, 5e5, 989e12) or "")
    assert mfu(6e9, 5e5, None) is None
    assert mfu_warning(6e9, 5e5, None) is None


def test_a_measured_peak_is_kept_for_this_machine_and_only_rises(tmp_path, monkeypatch):
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    cpu = torch.device("cpu")
    assert device_peak_flops(cpu, torch.bfloat16) is None
    measured_peaks.store_measured_peak("torch.bfloat16", 3e11)
    measured_peaks.store_measured_peak("bfloat16", 2e11)
    assert device_peak_flops(cpu, torch.bfloat16) == 3e11
    assert device_peak_flops(cpu, torch.bfloat16, ranks_on_host=2) == 1.5e11
    assert device_peak_flops(cpu, torch.float32) is None
    assert device_peak_flops(cpu, torch.float32, override=7.0) == 7.0
    monkeypatch.setattr(measured_peaks, "cpu_model", lambda: "another")
    assert device_peak_flops(cpu, torch.bfloat16) is None


@pytest.mark.parametrize("content", ["", "[]", "not json", '{"x": 3}'])
def test_a_broken_file_of_peaks_is_no_peak_and_is_replaced(tmp_path, content):
    file = tmp_path / "peaks.json"
    file.write_text(content)
    assert measured_peaks.measured_peak("bfloat16", file) is None
    measured_peaks.store_measured_peak("bfloat16", 5.0, file)
    assert measured_peaks.measured_peak("bfloat16", file) == 5.0
    assert json.loads(file.read_text())
