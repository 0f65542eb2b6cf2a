"""Packed documents: positions restart, nothing leaks, on every backend that runs here."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from armillary.foundation.errors import UserError
from armillary.models.layers.backends import BACKENDS, Conditions, attention_problems, backend_for
from armillary.models.layers.backends import varlen as varlen_module
from armillary.models.layers.documents import Documents
from armillary.models.llama.config import Llama
from model_cases import FAMILIES, build, random_tokens, relative_difference

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
HERE = ["blocked", "sdpa", "flex"]
LENGTHS = [[5, 70, 1, 54], [130], [64, 66]]  # around the block sizes of 64 and 128


def test_starts_and_positions_follow_from_lengths() -> None:
    documents = Documents.from_lengths([[3, 1, 2], [6]])
    assert documents.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert documents.starts.tolist() == [[0, 0, 0, 3, 4, 4], [0] * 6]
    assert documents.cumulative_lengths().tolist() == [0, 3, 4, 6, 12]
    assert documents.cumulative_lengths().dtype == torch.int32
    assert not documents.one_per_row


@pytest.mark.parametrize("lengths", [[[2], [3]], [[2, 0]], [[2], []], [[]]])
def test_lengths_that_do_not_tile_rows_are_refused(lengths: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"rows must hold|every row needs"):
        Documents.from_lengths(lengths)


@pytest.mark.parametrize("attention", HERE)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_perturbing_one_document_changes_no_logit_of_another(family: str, attention: str) -> None:
    model = build(FAMILIES[family], attention=attention)
    tokens, documents = random_tokens(3, 130), Documents.from_lengths(LENGTHS)
    before = model(tokens, documents)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            end = start + length
            changed = tokens.clone()
            changed[row, start:end] = (changed[row, start:end] + 1) % 61
            difference = (model(changed, documents) - before).abs()
            assert difference[row, start:end].max() > 1e-3
            difference[row, start:end] = 0
            assert difference.max() == 0
            start = end


@pytest.mark.parametrize("attention", HERE)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_packed_document_has_the_logits_it_has_alone(family: str, attention: str) -> None:
    model = build(FAMILIES[family], attention=attention)
    tokens = random_tokens(1, 40)
    twice = model(tokens.repeat(1, 2), Documents.from_lengths([[40, 40]]))
    alone = model(tokens)
    declared = model(tokens, Documents.from_lengths([[40]]))
    for logits in (twice[:, :40], twice[:, 40:], declared):
        assert relative_difference(logits, alone) <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_backends_agree_on_logits_and_gradients(family: str) -> None:
    tokens, documents = random_tokens(3, 130), Documents.from_lengths(LENGTHS)
    logits, gradients = {}, {}
    for attention in ("blocked", "sdpa"):
        model = build(FAMILIES[family], attention=attention)
        logits[attention] = model(tokens, documents)
        logits[attention].square().mean().backward()
        gradients[attention] = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        logits["flex"] = build(FAMILIES[family], attention="flex")(tokens, documents)
    for attention in ("sdpa", "flex"):
        assert relative_difference(logits[attention], logits["blocked"]) <= 2e-6
    for ours, theirs in zip(gradients["blocked"], gradients["sdpa"], strict=True):
        assert relative_difference(ours, theirs) <= 5e-6


def test_a_backend_that_cannot_run_here_says_so_before_and_during() -> None:
    cpu = Conditions(device_type="cpu", head_width=16)
    assert attention_problems("auto", cpu) == []
    assert attention_problems("flex", replace(cpu, training=False)) == []
    assert "no backward pass" in attention_problems("flex", cpu)[0].message
    assert "no kernel for cpu" in attention_problems("varlen", cpu)[0].message
    assert backend_for("auto", "cpu", 16) is BACKENDS["blocked"]
    assert backend_for("auto", "mps", 16) is BACKENDS["sdpa"]
    for attention in ("flex", "varlen"):
        with pytest.raises(UserError, match=f"model.attention = {attention}"):
            build(FAMILIES["llama"], attention=attention)(random_tokens(1, 8))


def test_the_limits_of_cuda_kernels_are_known_before_a_tensor_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # triton is there
    assert Llama(attention="varlen").device_problems("cuda") == []
    (problem,) = Llama(attention="varlen").device_problems("cuda", "float32")
    assert "computes in 16 bit, not in float32" in problem.message
    assert Llama(attention="flex", head_dim=16).device_problems("cuda", "float32") == []
    (problem,) = Llama(attention="flex", head_dim=8).device_problems("cuda")
    assert "flex needs heads of 16 or wider on cuda, and they are 8 wide" in problem.message
    assert Llama(head_dim=8).device_problems("cuda") == []
    assert backend_for("auto", "cuda", 16) is BACKENDS["flex"]
    assert backend_for("auto", "cuda", 8) is BACKENDS["sdpa"]


def test_varlen_reads_the_same_cut_padded_to_a_power_of_two() -> None:
    tokens, varlen = random_tokens(2, 6), BACKENDS["varlen"]
    packed = varlen.prepare(Documents.from_lengths([[3, 1, 2], [6]]), tokens)
    assert packed.tolist() == [0, 3, 4, 6, 12, 12, 12, 12]
    assert varlen.prepare(None, tokens).tolist() == [0, 6, 12, 12]


def attention_by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, *rest: object,
    window_size: tuple[int, int], enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What torch documents of varlen_attn, which has no kernel here: one sequence at a time."""
    assert window_size == (-1, 0)
    parts = []
    for first, last in itertools.pairwise(ends.tolist()):
        one = [x[first:last].transpose(0, 1) for x in (q, k, v)]
        attended = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=enable_gqa)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("groups", [True, False])
@torch.no_grad()
def test_varlen_hands_documents_over_as_sequences(
    groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_module, "varlen_attn", attention_by_sequence)
    monkeypatch.setattr(varlen_module, "_limits", lambda device_type, dtype: [])
    monkeypatch.setattr(varlen_module, "_GROUPS", groups)
    tokens, documents = random_tokens(3, 130), Documents.from_lengths(LENGTHS)
    ours, expected = (
        build(FAMILIES["qwen3"], attention=attention)(tokens, documents)
        for attention in ("varlen", "sdpa")
    )
    assert relative_difference(ours, expected) <= 2e-6
