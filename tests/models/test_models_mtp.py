"""Multi-token prediction: what the extra block learns from, and that it changes nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from armillary.data.batch import IGNORED, Batch
from armillary.models.layers.documents import Documents
from armillary.models.layers.moe import MoE
from armillary.models.multi_token import AheadBlock, MultiTokenDecoder
from armillary.tasks.next_token import NextToken, labels_ahead
from model_cases import random_tokens
from moe_cases import MOE_FAMILIES, build_moe

CONFIG = replace(MOE_FAMILIES["deepseek v3"], predict_ahead=True)
TASK = NextToken(chunk_tokens=16, ahead_coefficient=0.3)


def batch_of(lengths: list[list[int]], *, seed: int = 0) -> Batch:
    length = sum(lengths[0])
    documents = Documents.from_lengths(lengths)
    tokens = random_tokens(len(lengths), length + 1, seed=seed)
    labels = tokens[:, 1:].clone()
    labels[:, :-1][documents.starts[:, 1:] != documents.starts[:, :-1]] = IGNORED
    return Batch(tokens[:, :-1], labels, documents, tuple(range(len(lengths))))


def rows_of(batch: Batch, rows: list[int]) -> Batch:
    documents = Documents.from_lengths([batch.documents.lengths[row] for row in rows])
    ids = tuple(batch.sample_ids[row] for row in rows)
    return Batch(batch.tokens[rows], batch.labels[rows], documents, ids)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, grad in expected.items():  # the cross-entropy is fp32, all else fp64
        assert (ours[name] - grad).abs().max() <= 1e-6 * grad.abs().max().clamp(min=1e-3), name


def model_of(seed: int = 0) -> MultiTokenDecoder:
    model = build_moe(CONFIG, seed=seed).double().train()
    assert isinstance(model, MultiTokenDecoder)
    return model


def test_labels_one_token_further_stay_in_their_document() -> None:
    batch = batch_of([[3, 1, 4]])
    t = batch.tokens[0].tolist()
    assert batch.labels[0].tolist()[:-1] == [t[1], t[2], IGNORED, IGNORED, t[5], t[6], t[7]]
    last = batch.labels[0, -1].item()
    expected = [t[2], IGNORED, IGNORED, IGNORED, t[6], t[7], last, IGNORED]
    assert labels_ahead(batch)[0].tolist() == expected
    assert TASK.weights(batch) == (6, 4)


def test_gradients_are_those_of_both_means_and_the_loss_is_the_main_one() -> None:
    batch, model, plain = batch_of([[20, 12], [32]]), model_of(), model_of()
    main_weight, ahead_weight = TASK.weights(batch)
    loss = TASK.within((main_weight, ahead_weight)).loss(model, batch)
    loss.sum.backward()
    context = plain.context(batch.tokens, batch.documents)
    hidden = plain.run(plain.embedding(batch.tokens), context)
    logits = plain.head(plain.norm(hidden)).flatten(0, 1)
    *_, block = plain.layers.values()
    assert isinstance(block, AheadBlock)
    following = plain.embedding(torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), dim=1))
    further = block(hidden, following, context.rope, context.visible[None])
    cross_entropy = torch.nn.functional.cross_entropy
    main = cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    ahead_labels = labels_ahead(batch).flatten()
    ahead = cross_entropy(plain.head(further).flatten(0, 1), ahead_labels, reduction="sum")
    (main + 0.3 * main_weight / ahead_weight * ahead).backward()
    torch.testing.assert_close(loss.sum.double(), main, rtol=1e-6, atol=0)
    assert int(loss.weight) == main_weight
    ours, expected = gradients(model), gradients(plain)
    assert ours.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert_same(ours, expected)


def test_gradients_do_not_depend_on_accumulation() -> None:
    batch = batch_of([[20, 12], [32], [5] * 6 + [2], [31, 1]])
    task = TASK.within(TASK.weights(batch))
    whole, parts = model_of(), model_of()
    task.loss(whole, batch).sum.backward()
    for rows in ([0], [1, 2], [3]):
        task.loss(parts, rows_of(batch, rows)).sum.backward()
    assert_same(gradients(whole), gradients(parts))
    alone = model_of()  # a batch by itself is a whole step
    TASK.loss(alone, batch).sum.backward()
    assert_same(gradients(whole), gradients(alone))


def test_ahead_is_off_outside_training_and_leaves_the_main_model_alone() -> None:
    batch = batch_of([[20, 12], [32]])
    quiet = replace(CONFIG, router=replace(CONFIG.router, sequence_loss=0.0))
    looking = build_moe(quiet).double().train()
    plain = build_moe(replace(quiet, predict_ahead=False)).double()
    plain.load_state_dict(
        {k: v for k, v in looking.state_dict().items() if not k.startswith("layers.3.")}
    )
    with torch.no_grad():
        assert torch.equal(looking(batch.tokens), plain(batch.tokens))
        evaluated = TASK.loss(looking.eval(), batch).sum
        assert torch.equal(evaluated, TASK.loss(plain, batch).sum)
    looking.train()
    NextToken(ahead_coefficient=0.0).loss(looking, batch).sum.backward()
    TASK.loss(plain.train(), batch).sum.backward()
    ours, expected = gradients(looking), gradients(plain)
    assert_same(ours, expected)
    assert {g.abs().max().item() for n, g in ours.items() if n.startswith("layers.3.")} == {0.0}


def test_what_looks_ahead_stays_in_its_document() -> None:
    batch, model = batch_of([[20, 12]]), model_of()
    seen: list[torch.Tensor] = []
    model.layers["3"].register_forward_hook(lambda module, inputs, out: seen.append(out))
    changed = replace(batch, tokens=batch.tokens.clone())
    changed.tokens[0, 20:] = (changed.tokens[0, 20:] + 5) % 61
    for one in (batch, changed):
        TASK.loss(model, one)
    difference = (seen[1] - seen[0]).abs().amax(-1)[0]
    assert difference[:19].max() <= 1e-13  # the last token's label is ignored
    assert difference[20:].min() > 0


def test_the_extra_block_counts_its_experts_loads_too() -> None:
    batch, model = batch_of([[32]]), model_of()
    TASK.loss(model, batch).sum.backward()
    loads = [int(m.take_counts().sum()) for m in model.modules() if isinstance(m, MoE)]
    assert loads == [32 * 2] * 3  # two layers of the main model, and the extra one


def test_a_negative_coefficient_is_refused() -> None:
    (problem,) = NextToken(ahead_coefficient=-1.0).problems()
    assert "task.ahead_coefficient" in problem.message
    assert NextToken().weights(batch_of([[4]])) == pytest.approx((4, 3))
