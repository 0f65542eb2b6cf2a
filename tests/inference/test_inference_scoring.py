"""Packed rows through a live model give what each text alone gives, on every mesh."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from armillary.checkpoint.ranks import Ranks
from armillary.evaluation.items import Likelihood, Request
from armillary.foundation.progress import NoProgress
from armillary.inference.rows import Rows, pieces_of
from armillary.inference.scoring import Scorer, ScoringFailed
from armillary.inference.undisturbed import undisturbed
from armillary.models.config import ModelConfig
from armillary.models.decoder import Decoder
from armillary.models.layers.block import Block
from armillary.parallel.config import Parallel, Scale
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel
from armillary.parallel.parallelize import parallelize
from armillary.precision.config import Precision
from model_cases import FAMILIES
from moe_cases import MOE_FAMILIES
from ranks import run_ranks

LENGTH = 48
CASES: dict[str, ModelConfig] = {**FAMILIES, **MOE_FAMILIES}


def requests(count: int = 40) -> list[Request]:
    """Short and long ones, some without a context or a continuation, one longer than three rows."""
    draw = random.Random(7)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(61), k=draw.randint(0, most)))

    found = [Request(tokens(30), tokens(12)) for _ in range(count)]
    long = tuple(draw.choices(range(61), k=170))
    return [*found, Request((1,), long), Request(long, (3, 4)), Request((), (5,)), Request((), ())]


def scored(model: ParallelModel, asked: list[Request], **changes: Any) -> list[Likelihood]:
    with closing(Ranks()) as ranks:
        options: dict[str, Any] = {"row_length": LENGTH, "stride": LENGTH, "rows_at_once": 3}
        options |= {"vocab_size": 61} | changes
        scorer = Scorer(
            model=model,
            ranks=ranks,
            sums=lambda numbers: ranks.sums_and_any(numbers, False)[0],
            progress=NoProgress(),
            **options,
        )
        with undisturbed(model):
            return scorer.score(asked, "scoring")


def spread(config: ModelConfig, parallel: Parallel, dtype: str = "float32") -> ParallelModel:
    with torch.device("meta"):
        whole = config.build()
    scale = Scale(parallel=parallel, precision=Precision(compute=dtype))
    model = parallelize(whole, Mesh.create(parallel, torch.device("cpu")), scale)
    materialise(model, torch.device("cpu"), seed=3)
    return model


@torch.no_grad()
def alone(model: Decoder, request: Request, *, stride: int = LENGTH) -> Likelihood:
    """Each piece of a request by itself, from all of its logits in float64."""
    nats, greedy, count = 0.0, True, 0
    whole = (*request.context, *request.continuation)
    for piece in pieces_of(request, 0, length=LENGTH, stride=stride):
        tokens = torch.tensor([whole[piece.start : piece.start + piece.length]])
        labels = torch.tensor(whole[piece.start + 1 : piece.start + piece.length + 1])
        logits = model(tokens)[0].double()[-piece.scored :]
        labels = labels[-piece.scored :]
        nats -= float(logits.log_softmax(-1).gather(1, labels[:, None]).sum())
        greedy &= bool((logits.argmax(-1) == labels).all())
        count += piece.scored
    return Likelihood(nats, greedy, count)


@pytest.mark.parametrize("family", CASES)
def test_packed_rows_give_each_text_the_likelihood_that_it_has_alone(family: str) -> None:
    torch.set_num_threads(1)
    model = spread(CASES[family], Parallel(device="cpu"))
    asked = requests(12)
    (part,) = model.parts
    part.eval()
    assert isinstance(part, Decoder)
    for stride in (LENGTH, 16):
        for found, request in zip(scored(model, asked, stride=stride), asked, strict=True):
            expected = alone(part, request, stride=stride)
            assert found.nats == pytest.approx(expected.nats, rel=2e-5, abs=1e-5)
            assert (found.greedy, found.tokens) == (expected.greedy, expected.tokens)


def test_what_the_model_itself_would_write_is_greedy() -> None:
    model = spread(FAMILIES["llama"], Parallel(device="cpu"))
    (part,) = model.parts
    row = [1]
    for _ in range(6):
        row.append(int(part(torch.tensor([row]))[0, -1].argmax()))
    other = [*row[:-1], (row[-1] + 1) % 61]
    asked = [Request((1,), tuple(row[1:])), Request((1,), tuple(other[1:]))]
    assert [answer.greedy for answer in scored(model, asked)] == [True, False]
    zeros = [Request((0,), (0, 0))]
    assert [scored(model, zeros, vocab_size=size)[0].greedy for size in (61, 1)] == [False, True]


@pytest.mark.parametrize("stride", [1, 7, 16])
def test_windows_score_each_token_once_with_the_context_that_was_asked_for(stride: int) -> None:
    draw = random.Random(stride)
    for _ in range(300):
        request = Request((0,) * draw.randint(0, 40), (0,) * draw.randint(0, 60))
        pieces = pieces_of(request, 0, length=16, stride=stride)
        inputs = len(request.context) + len(request.continuation) - 1
        first = max(0, len(request.context) - 1) if request.continuation else inputs
        found = [
            label
            for piece in pieces
            for label in range(
                piece.start + piece.length - piece.scored, piece.start + piece.length
            )
        ]
        assert found == list(range(first, max(first, inputs)))
        for piece in pieces:
            assert 1 <= piece.scored <= piece.length <= 16
            assert piece.start >= 0
        for piece in pieces[1:]:
            assert piece.length - piece.scored == 16 - stride


def test_rows_are_filled_and_no_request_is_read_twice() -> None:
    asked = requests()
    rows = Rows(asked, length=LENGTH, stride=LENGTH, at_once=4)
    used = sum(piece.length for piece in rows.pieces)
    assert used / (rows.n_rows * LENGTH) > 0.93
    read = [rows.reading(index) for index in range(rows.n_readings)]
    seen = sorted(piece for each in read for piece in set(each.pieces.tolist()))
    assert seen == list(range(len(rows.pieces)))
    past = rows.reading(rows.n_readings)
    assert past.tokens.shape == read[0].tokens.shape
    assert len(past.places) == 0


MESHES: dict[str, tuple[str, Parallel]] = {
    "fsdp-4": ("llama", Parallel(dp_shard=4)),
    "hsdp-2x2": ("qwen3", Parallel(dp_replicate=2, dp_shard=2)),
    "tp-2-fsdp-2": ("llama", Parallel(dp_shard=2, tp=2)),
    "cp-2-fsdp-2": ("llama", Parallel(dp_shard=2, cp=2)),
    "pp-2-tp-2": ("llama tied", Parallel(pp=2, dp_shard=1, tp=2)),
    "ep-2-fsdp-4": ("qwen3-moe", Parallel(dp_shard=4, ep=2)),
    "deepseek-tp-2-ep-2": ("deepseek v3", Parallel(dp_shard=2, tp=2, ep=2)),
}
SAME_BITS = ("fsdp-4", "hsdp-2x2", "cp-2-fsdp-2")
"""Meshes on which each row is computed as on one rank."""
ALWAYS = ("cp-2-fsdp-2", "pp-2-tp-2", "deepseek-tp-2-ep-2")


def scored_on(names: tuple[str, ...]) -> dict[str, list[Likelihood]]:
    torch.set_num_threads(1)
    chosen = {name: MESHES[name] for name in names}
    return {
        name: scored(spread(CASES[family], parallel), requests())
        for name, (family, parallel) in chosen.items()
    }


@pytest.mark.parametrize(
    "names",
    [ALWAYS, pytest.param(tuple(sorted(set(MESHES) - set(ALWAYS))), marks=pytest.mark.full)],
    ids=["always", "others"],
)
def test_likelihoods_do_not_depend_on_the_mesh(names: tuple[str, ...]) -> None:
    by_rank = run_ranks(scored_on, 4, names, timeout=240)
    for name in names:
        expected = scored(spread(CASES[MESHES[name][0]], Parallel(device="cpu")), requests())
        for found in by_rank:
            assert [answer.greedy for answer in found[name]] == [each.greedy for each in expected]
            if name in SAME_BITS:
                assert found[name] == expected, name
            for answer, each in zip(found[name], expected, strict=True):
                assert answer.nats == pytest.approx(each.nats, rel=2e-6, abs=2e-5), name


class OutOfMemory(RuntimeError):
    """As a device raises it."""


FAILING: dict[str, tuple[Parallel, tuple[int, ...], str]] = {
    "dp, in a block": (Parallel(dp_shard=2), (1,), "block"),
    "dp, at the head": (Parallel(dp_shard=2), (1,), "head"),
    "tp, alike": (Parallel(tp=2, dp_shard=1), (0, 1), "block"),
    "pp, in the first stage": (Parallel(pp=2, dp_shard=1), (0,), "block"),
    "pp, in the last stage": (Parallel(pp=2, dp_shard=1), (1,), "block"),
    "pp, at the head": (Parallel(pp=2, dp_shard=1), (1,), "head"),
}
"""On which mesh, which ranks fail, and where."""


def failing() -> dict[str, tuple[str, bool]]:
    """Has ranks fail in the midst of a forward pass; what all say, and whether they then go on."""
    torch.set_num_threads(1)
    found = {}
    for name, (parallel, ranks, where) in FAILING.items():
        model = spread(FAMILIES["llama"], parallel)
        before = scored(model, requests())
        undo = _plant(model, where) if model.mesh.rank in ranks else lambda: None
        said = "nothing"
        try:
            scored(model, requests())
        except ScoringFailed as error:
            said = str(error)
        undo()
        found[name] = (said, scored(model, requests()) == before)
    return found


def _plant(model: ParallelModel, where: str) -> Callable[[], None]:
    (part,) = model.parts
    assert isinstance(part, Decoder)
    block = list(part.layers.values())[-1]
    assert isinstance(block, Block)

    def fail(*_: object, **__: object) -> None:
        raise OutOfMemory("out of memory: tried to allocate 20 GiB")

    module, name = {
        "block": (block.attention, "forward"),
        "head": (part.head, "logits"),
    }[where]
    own, before = vars(module), dict(vars(module))
    own[name] = fail

    def undo() -> None:
        own.pop(name)
        own.update({name: before[name]} if name in before else {})

    return undo


def test_a_rank_that_fails_in_a_forward_pass_fails_on_all_and_nothing_is_broken() -> None:
    words = "OutOfMemory: out of memory: tried to allocate 20 GiB"
    for found in run_ranks(failing, 2):
        for name, (_, ranks, _) in FAILING.items():
            assert found[name] == ("; ".join(f"rank {rank}: {words}" for rank in ranks), True), name


def test_tokens_that_the_tokenizer_does_not_have_never_reach_the_model() -> None:
    model = spread(FAMILIES["llama"], Parallel(device="cpu"))
    for token in (-1, 60):
        with pytest.raises(ScoringFailed, match=f"no token {token}"):
            scored(model, [Request((1,), (2, token))], vocab_size=60)


def test_asking_leaves_mode_random_states_and_counts_of_experts_as_they_were() -> None:
    model = spread(replace(MOE_FAMILIES["deepseek v3"]), Parallel(device="cpu"))
    model.train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    counts = model.take_counts()
    scored(model, requests())
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    after = model.take_counts()
    assert counts is not None
    assert after is not None
    assert torch.equal(after, torch.zeros_like(after))
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
