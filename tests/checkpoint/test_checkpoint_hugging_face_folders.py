"""Folders that others wrote: what is not as it should be is told in words, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from armillary.checkpoint.hugging_face.check import check_conversion
from armillary.checkpoint.hugging_face.exporting import plan_export, write_export
from armillary.checkpoint.hugging_face.families import FAMILIES, family_for
from armillary.checkpoint.hugging_face.files import INDEX_NAME
from armillary.checkpoint.hugging_face.source import Filled, Live, read_all
from armillary.checkpoint.hugging_face.table import Reorder, Rule
from armillary.checkpoint.hugging_face.weights import (
    foreign_weights,
    open_foreign,
    our_shapes,
)
from armillary.foundation.errors import UserError
from armillary.models.dense import DenseDecoder
from armillary.models.rope_scaling import Llama31RopeScaling
from hugging_face_cases import CASES


def write(name: str, folder: Path, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """A case by our own exporter, in one file; returns its tensors."""
    model = CASES[name] if not changes else changes["model"]
    generator = torch.Generator().manual_seed(seed)
    sources = {
        n: Live(torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in n else 0.0))
        for n, shape in our_shapes(model).items()
    }
    write_export(plan_export(model, sources, extra_layer=True), folder)
    return load_file(folder / "model-00001-of-00001.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Other tensors in the place of those of a folder."""
    (folder / "model-00001-of-00001.safetensors").unlink()
    (folder / INDEX_NAME).unlink()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def weights_of(folder: Path, model: DenseDecoder | None = None) -> Any:
    foreign = open_foreign(str(folder))
    return foreign_weights(foreign, model or foreign.model)


def check(folder: Path, model: DenseDecoder | None = None) -> tuple[str, ...]:
    foreign = open_foreign(str(folder))
    model = model or foreign.model
    return check_conversion(foreign_weights(foreign, model), model)


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_ours_is_read_back_from_what_was_written_of_it(
    name: str, tmp_path: Path
) -> None:
    write(name, tmp_path / "out")
    foreign = open_foreign(str(tmp_path / "out"))
    read, written = foreign.model, CASES[name]
    assert foreign.ignored == ()
    assert family_for(written) is foreign.family
    assert FAMILIES[foreign.family.model_type].write(read) == foreign.family.write(written)
    assert our_shapes(read) == our_shapes(written)


@pytest.mark.parametrize("name", CASES)
def test_the_check_passes_what_the_table_converts(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "out")
    compared = check(tmp_path / "out")
    assert {"layers.0.attention.query", "layers.0.attention.output"} <= set(compared)
    assert any(part.endswith(".down") for part in compared)
    assert any(part.endswith("router") for part in compared) == hasattr(CASES[name], "router")


def wrong_table(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[list[Rule]], list[Rule]]
) -> None:
    """The family's table, changed on the way in."""
    family = family_for(CASES[name])
    rules = family.rules

    def changed(model: Any, config: Any) -> list[Rule]:
        return change(rules(model, config))

    monkeypatch.setitem(FAMILIES, family.model_type, replace(family, rules=changed))


def reordered(ending: str) -> Callable[[list[Rule]], list[Rule]]:
    """Rows by halves as if they came in pairs: the mistake that is made most."""

    def change(rules: list[Rule]) -> list[Rule]:
        found = []
        for rule in rules:
            if rule.ours[0].endswith(ending):
                rows = 64 if "query" in ending else 32
                rule = Rule(rule.ours, rule.theirs, Reorder(_pairs(rows)))  # noqa: PLW2901
            found.append(rule)
        return found

    return change


def _pairs(rows: int) -> Tensor:
    return torch.arange(rows).view(-1, 2, 4).mT.flatten()


def swapped(one: str, other: str) -> Callable[[list[Rule]], list[Rule]]:
    """Two names of ours in the place of each other."""

    def change(rules: list[Rule]) -> list[Rule]:
        def name(ours: str) -> str:
            if one in ours:
                return ours.replace(one, other)
            return ours.replace(other, one)

        return [Rule(tuple(map(name, r.ours)), r.theirs, r.transform) for r in rules]

    return change


def unpermuted(rules: list[Rule]) -> list[Rule]:
    """Rotated rows as they come, as if pairs were halves there too."""
    return [Rule(r.ours, r.theirs) if "attention.query.w" in r.ours[0] else r for r in rules]


WRONG = {
    "rows of queries": ("qwen3", reordered("attention.query.weight"), "attention.query"),
    "rows of keys": ("qwen3", reordered("attention.key.weight"), "attention.key"),
    "gate and up": ("llama", swapped("forward.gate", "forward.up"), "feed_forward.gate"),
    "keys and values": ("llama", swapped("attention.key", "attention.value"), "attention.value"),
    "norms": ("llama", swapped(".attention_norm", ".feed_forward_norm"), "attention_norm"),
    "rows that are not permuted": ("deepseek v3", unpermuted, "attention.query"),
    "gate and up of experts": (
        "qwen3-moe", swapped("experts.gate", "experts.up"), "experts.gate",
    ),
    "gate and up that alternate": (
        "gpt-oss", swapped("experts.gate", "experts.up"), "experts.gate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_table_is_refused_by_the_name_of_what_is_wrong(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, part = WRONG[mistake]
    write(name, tmp_path / "out")
    wrong_table(monkeypatch, name, change)
    with pytest.raises(UserError) as refused:
        check(tmp_path / "out")
    told = [problem.message for problem in refused.value.problems]
    assert any(f"{part}: our result differs" in message for message in told), told


def test_float8_weights_of_deepseek_are_read_and_checked(tmp_path: Path) -> None:
    tensors = write("deepseek v3", tmp_path / "out")
    quantised: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.ndim == 2 and "layers" in name and "gate.weight" not in name
        if not is_matrix:
            quantised[name] = tensor
            continue
        scale = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) + 0.01
        quantised[name] = (tensor / scale[0, 0]).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scale[:1, :1].expand(scale.shape).contiguous()
    rewrite(tmp_path / "out", quantised)
    weights = weights_of(tmp_path / "out")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    expected = (quantised[name].float() * quantised[f"{name}_scale_inv"]).bfloat16()
    found = read_all(weights.sources["layers.1.feed_forward.experts.down"])[3]
    assert torch.equal(found, expected)
    assert "layers.1.feed_forward.experts.down" in check(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_values_without_factors_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors = write("deepseek v3", tmp_path / "out")
    rewrite(tmp_path / "out", tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(UserError, match=rf"quantised values \(1\): {name} is {dtype}"):
        weights_of(tmp_path / "out")


def test_mxfp4_weights_of_gpt_oss_are_read_and_checked(tmp_path: Path) -> None:
    model = replace(CASES["gpt-oss"], dim=64, expert_dim=32)
    tensors = write("gpt-oss", tmp_path / "out", model=model)
    packed = {n: t for n, t in tensors.items() if not n.endswith(("up_proj", "down_proj"))}
    generator = torch.Generator().manual_seed(1)
    for name in tensors.keys() - packed.keys():
        experts, inputs, outputs = tensors[name].shape
        blocks = (experts, outputs, inputs // 32, 16)
        packed[f"{name}_blocks"] = torch.randint(
            0, 256, blocks, dtype=torch.uint8, generator=generator
        )
        packed[f"{name}_scales"] = torch.randint(
            122, 126, blocks[:3], dtype=torch.uint8, generator=generator
        )
    rewrite(tmp_path / "out", packed)
    found = weights_of(tmp_path / "out").sources
    assert found["layers.0.feed_forward.experts.gate"].shape == (8, 32, 64)
    assert "layers.0.feed_forward.experts.down" in check(tmp_path / "out")


def test_the_extra_layer_of_deepseek_is_left_out_with_a_word_or_read(tmp_path: Path) -> None:
    model = replace(CASES["deepseek v3"], predict_ahead=True)
    write("deepseek v3", tmp_path / "out", model=model)
    plain = weights_of(tmp_path / "out")
    (line,) = plain.left_out
    assert "model.layers.3." in line and "--model.predict-ahead" in line
    read = open_foreign(str(tmp_path / "out")).model
    ahead = weights_of(tmp_path / "out", replace(read, predict_ahead=True))
    assert ahead.left_out == ()
    assert "layers.3.projection" in check(tmp_path / "out", replace(read, predict_ahead=True))


@pytest.mark.parametrize(("layers", "written"), [(3, False), (61, True)])
def test_the_extra_layer_is_written_where_others_pass_over_it_or_if_asked(
    layers: int, written: bool
) -> None:
    model = replace(CASES["deepseek v3"], predict_ahead=True, n_layers=layers)
    sources = {n: Filled(shape) for n, shape in our_shapes(model).items()}
    name = f"model.layers.{layers}.eh_proj.weight"
    plan = plan_export(model, sources)
    assert (name in plan.tensors) == written != bool(plan.left_out)
    assert plan.config["num_nextn_predict_layers"] == written
    whole = plan_export(model, sources, extra_layer=True)
    assert name in whole.tensors and not whole.left_out


def test_all_that_is_missing_or_has_no_place_is_told_at_once(tmp_path: Path) -> None:
    tensors = write("llama", tmp_path / "out")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.extra"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(3)
    rewrite(tmp_path / "out", tensors)
    with pytest.raises(UserError) as refused:
        weights_of(tmp_path / "out")
    told = str(refused.value)
    assert "lacks (1): model.layers.1.mlp.up_proj.weight" in told
    assert "no place for (1): model.layers.1.mlp.extra" in told
    assert "model.norm.weight [3] instead of [32]" in told


def test_a_copy_of_a_tied_head_is_left_out_with_a_word(tmp_path: Path) -> None:
    tensors = write("llama tied", tmp_path / "out")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path / "out", tensors)
    assert weights_of(tmp_path / "out").left_out == ("lm_head.weight: is tied to the embedding",)


@pytest.mark.parametrize("rows", [256, 320])
def test_another_vocabulary_size_cuts_rows_off_or_adds_zeros(rows: int, tmp_path: Path) -> None:
    tensors = write("llama", tmp_path / "out")
    read = open_foreign(str(tmp_path / "out")).model
    weights = weights_of(tmp_path / "out", replace(read, vocab_size=rows))
    found = read_all(weights.sources["head.weight"])
    common = min(rows, len(tensors["lm_head.weight"]))
    assert torch.equal(found[:common], tensors["lm_head.weight"][:common])
    assert not found[common:].any() and len(found) == rows


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
TURNED_IN_PART = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
SPELLINGS = {
    "old": {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
    "older": {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
    "new": {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_stretching_of_llama_3_1_is_read_in_every_spelling(
    spelling: str, tmp_path: Path
) -> None:
    write("llama", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_theta", "rope_scaling"):
        del config[name]
    path.write_text(json.dumps(config | SPELLINGS[spelling]))
    foreign = open_foreign(str(tmp_path / "out"))
    assert foreign.model.rope_theta == 5e5
    assert foreign.model.rope_scaling == Llama31RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_max_seq_len=8192
    )
    assert foreign.ignored == ()
    assert "layers.0.attention.query" in check(tmp_path / "out")


VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "part": ({"rope_parameters": TURNED_IN_PART}, "partial_rotary_factor is 0.5"),
    "both": (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": LLAMA3},
        r"rope_scaling is .*\n.*the same as rope_parameters",
    ),
    "norm": ({"rms_norm_eps": None}, "rms_norm_eps is absent"),
    "bias": ({"attention_bias": True}, "attention_bias is True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "rope": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
    "family": ({"model_type": "qwen33"}, "model_type is 'qwen33'"),
    "kind": ({"hidden_size": "32"}, "hidden_size is '32'"),
    "endless": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_that_is_not_ours_is_refused_in_words(variant: str, tmp_path: Path) -> None:
    write("llama", tmp_path / "out")
    changes, told = VARIANTS[variant]
    configure(tmp_path / "out", **changes)
    with pytest.raises(UserError, match=told):
        open_foreign(str(tmp_path / "out"))


def test_keys_that_nobody_has_asked_for_are_named(tmp_path: Path) -> None:
    write("llama", tmp_path / "out")
    scaling = LLAMA3 | {"rope_type": "llama3", "odd": 1}
    configure(tmp_path / "out", logit_softcap=30.0, rope_scaling=scaling)
    ignored = open_foreign(str(tmp_path / "out")).ignored
    assert ignored == ("logit_softcap", "rope_scaling.odd")


def test_a_model_that_the_family_cannot_express_is_not_written() -> None:
    model = CASES["qwen3-moe"]
    odd = replace(model, router=replace(model.router, scale=2.0))
    sources = {n: Filled(shape) for n, shape in our_shapes(odd).items()}
    with pytest.raises(UserError, match=r"model.router.scale = 2.0 cannot be written"):
        plan_export(odd, sources)


FOLDER_NAMES = ("../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "")


@pytest.mark.parametrize("name", FOLDER_NAMES)
def test_an_index_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    write("llama", tmp_path / "out")
    path = tmp_path / "out" / INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match="in no file of this folder"):
        weights_of(tmp_path / "out")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    write("llama", tmp_path / "out")
    (tmp_path / "out" / "model-00001-of-00001.safetensors").rename(tmp_path / "out" / "model.bin")
    (tmp_path / "out" / INDEX_NAME).unlink()
    with pytest.raises(UserError, match="is a pickle, which is not read"):
        weights_of(tmp_path / "out")


FUZZED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(
    file=st.sampled_from(["model-00001-of-00001.safetensors", INDEX_NAME, "config.json"]),
    at=st.integers(0, 4000),
    new=st.binary(min_size=0, max_size=12),
    cut=st.booleans(),
)
@FUZZED
def test_whatever_bytes_a_folder_holds_the_end_is_weights_or_words(
    file: str, at: int, new: bytes, cut: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    if not folder.exists():
        write("llama", folder)
    path = folder / file
    before = path.read_bytes()
    at = min(at, len(before))
    path.write_bytes(before[:at] + new + (b"" if cut else before[at + len(new) :]))
    try:
        weights = weights_of(folder)
        read_all(weights.sources["norm.weight"])
    except (UserError, OSError):
        pass
    finally:
        path.write_bytes(before)
