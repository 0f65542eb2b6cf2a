"""What ranks hold, without them: equal to arithmetic, and to what is there once a mesh is real."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from armillary.models.config import ModelConfig
from armillary.models.deepseek import deepseek
from armillary.models.layers.low_rank import is_factor
from armillary.models.llama import Llama, llama3
from armillary.models.tuning.config import LoRA
from armillary.optim.adamw import AdamW
from armillary.optim.muon import Muon
from armillary.parallel import Parallel, Scale
from armillary.parallel.account import Account
from armillary.parallel.layout import local_tensor
from armillary.parallel.mesh import Mesh
from armillary.parallel.parallelize import parallelize
from armillary.parallel.pretended import pretended

TINY = Llama(vocab_size=67, dim=24, n_layers=6, n_heads=4, n_kv_heads=4, ffn_dim=40)

MIXED = deepseek("debug")

HUGE = Parallel(pp=8, dp_shard=8, tp=8)


def account(
    parallel: Parallel, world_size: int, model: ModelConfig = TINY, optimizer: object = None
) -> Account:
    return Account(model, parallel, optimizer or AdamW(), world_size)  # type: ignore[arg-type]


def whole_sizes(model: ModelConfig) -> dict[str, int]:
    with torch.device("meta"):
        return {name: parameter.numel() for name, parameter in model.build().named_parameters()}


degree = st.sampled_from([1, 1, 2, 4])


parallels = st.builds(
    Parallel, pp=st.sampled_from([1, 2, 3]), dp_replicate=st.sampled_from([1, 2]),
    dp_shard=st.sampled_from([1, 2, 3, 5]), cp=st.sampled_from([1, 2]), tp=degree,
    schedule=st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
)  # fmt: skip


@settings(max_examples=25)
@given(parallels)
def test_all_ranks_together_hold_each_parameter_as_often_as_it_is_copied(
    parallel: Parallel,
) -> None:
    world_size = math.prod(parallel.degrees.values())
    assume(parallel.problems(world_size) == [])
    books = account(parallel, world_size)
    held: Counter[str] = Counter()
    for rank in range(world_size):
        for each in books.rank(rank).parameters:
            held[each.name] += each.elements
    copies = parallel.dp_replicate
    for name, whole in whole_sizes(TINY).items():
        cut_by_tp = any(word in name for word in ("attention.", "feed_forward.", "embed", "head"))
        assert held[name] == whole * copies * (1 if cut_by_tp else parallel.tp), name
    layers = [name for stage in books.stages() for name in stage.layers]
    assert layers == [str(index) for index in range(TINY.n_layers)]
    assert sum(stage.cost for stage in books.stages()) == pytest.approx(1.0)
    roles = books.roles()
    assert sorted(rank for role in roles for rank in role.ranks) == list(range(world_size))
    for role in roles:
        assert books.rank(role.ranks[-1]).bytes == role.example.bytes


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]), st.booleans(),
)  # fmt: skip
def test_experts_are_held_as_often_as_the_model_is_copied(
    pp: int, dp_replicate: int, dp_shard: int, tp: int, cut: bool
) -> None:
    ep, expert_tp = (dp_shard, tp) if cut else (min(8, dp_shard * tp), 1)
    parallel = Parallel(
        pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, ep=ep, expert_tp=expert_tp
    )
    world_size = pp * dp_replicate * dp_shard * tp
    books = account(parallel, world_size, MIXED)
    held: Counter[str] = Counter()
    for rank in range(world_size):
        for each in books.rank(rank).parameters:
            held[each.name] += each.elements
    for name, whole in whole_sizes(MIXED).items():
        if ".experts." in name:
            assert held[name] == whole * dp_replicate, name


REAL = {
    "pp2 fsdp2 tp2": (TINY, Parallel(pp=2, tp=2), 8),
    "hsdp, uneven": (TINY, Parallel(dp_replicate=2, dp_shard=5), 10),
    "v-shaped": (TINY, Parallel(pp=2, tp=2, schedule="ZBVZeroBubble"), 4),
    "cp2 tp4": (TINY, Parallel(cp=2, tp=4), 16),
    "experts over tp": (MIXED, Parallel(pp=2, tp=2, ep=4), 16),
    "experts in pieces": (MIXED, Parallel(dp_replicate=2, tp=2, ep=2, expert_tp=2), 16),
    "fewer experts than ranks": (MIXED, Parallel(), 16),
}


@pytest.mark.parametrize("case", REAL)
def test_the_books_say_what_is_there_once_the_mesh_is_real(case: str) -> None:
    model, parallel, world_size = REAL[case]
    books = account(parallel, world_size, model)
    for rank in (0, world_size // 2, world_size - 1):
        assert_as_real(model, books, parallel, world_size, rank)


def assert_as_real(
    model: ModelConfig, books: Account, parallel: Parallel, world_size: int, rank: int
) -> None:
    """Compares with the parameters of the real passes, data sharding included, on `meta`."""
    with pretended(world_size, rank):
        mesh = Mesh.create(parallel, torch.device("cpu"))
        with torch.device("meta"):
            built = model.build()
        parts = parallelize(built, mesh, Scale(parallel=parallel)).parts
        real = [
            (name, tuple(local_tensor(parameter).shape))
            for part in parts
            for name, parameter in part.named_parameters()
        ]
    told = [(each.name, each.local_shape) for each in books.rank(rank).parameters]
    assert [shape for _, shape in told] == [shape for _, shape in real]
    elements = sum(math.prod(shape) for _, shape in real)
    assert books.rank(rank).bytes["parameters"] == 4 * elements


def test_tied_weights_are_held_by_both_ends_of_a_pipeline() -> None:
    model = Llama(vocab_size=64, dim=32, n_layers=4, n_heads=4, n_kv_heads=4, tied_embeddings=True)
    books = account(Parallel(pp=2), 4, model)
    names = [[each.name for each in books.rank(rank).parameters] for rank in (0, 2)]
    assert [each.count("embedding.weight") for each in names] == [1, 1]
    both = account(Parallel(pp=2, schedule="DualPipeV"), 2, model)
    assert [each.name for each in both.rank(0).parameters].count("embedding.weight") == 2
    assert [each.name for each in both.rank(1).parameters].count("embedding.weight") == 0


def test_neighbours_and_stages_follow_the_schedule() -> None:
    straight = account(Parallel(pp=2, tp=2), 4)
    assert [(straight.rank(r).before, straight.rank(r).after) for r in (0, 3)] == [
        ((), (2,)),
        ((1,), ()),
    ]
    looped = account(Parallel(pp=2, schedule="LoopedBFS"), 2)
    assert [list(looped.rank(rank).stages) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert (looped.rank(0).before, looped.rank(0).after) == ((1,), (1, 1))
    bent = account(Parallel(pp=2, schedule="ZBVZeroBubble"), 2)
    assert [list(bent.rank(rank).stages) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert (bent.rank(1).before, bent.rank(1).after) == ((0,), (0,))


def test_optimizer_state_follows_the_optimizer() -> None:
    adamw = account(Parallel(dp_shard=2), 2).rank(1)
    assert adamw.bytes["gradients"] == adamw.bytes["parameters"] == 4 * adamw.elements
    assert adamw.bytes["optimizer"] == 8 * adamw.elements
    muon = account(Parallel(dp_shard=2), 2, optimizer=Muon()).rank(1)
    matrices = sum(
        each.elements
        for each in muon.parameters
        if each.name.startswith("layers.") and len(each.shape) == 2
    )
    assert muon.bytes["optimizer"] == 8 * muon.elements - 4 * matrices
    mixed = account(Parallel(dp_shard=2), 2, MIXED, Muon()).rank(0)
    assert {each.moments for each in mixed.parameters if ".experts." in each.name} == {1}


def test_llama_405b_on_512_ranks_is_as_arithmetic_says() -> None:
    model = llama3("405B")
    books = account(HUGE, 512, model)
    matrices = model.matmul_parameters()
    per_layer = (matrices["attention.projections"] + matrices["feed_forward"]) // model.n_layers
    vocabulary = model.vocab_size * model.dim
    total = 0
    for stage in range(8):
        rank = stage * 64 + 17 * stage % 64
        held = books.rank(rank)
        (layers,) = held.stages.values()
        elements = len(layers) * (per_layer // 64 + 2 * model.dim // 8)
        if stage in (0, 7):
            elements += vocabulary // 64
        if stage == 7:
            elements += model.dim // 8
        assert held.elements == elements
        assert sum(held.bytes.values()) == 16 * elements
        total += 64 * elements
    # Norms are whole on each of the 8 ranks of tp; everything else is there once.
    assert total == model.parameter_count() + 7 * model.norm_parameters()
    assert_as_real(model, books, HUGE, 512, 7 * 64 + 9)


def test_deepseek_v3_on_1024_ranks_is_as_arithmetic_says() -> None:
    model, parallel = deepseek("671B"), Parallel(pp=16, ep=64)
    books = account(parallel, 1024, model)
    total = 0
    for stage in range(16):
        held = books.rank(stage * 64 + 5 * stage % 64)
        # 64 divides all there is: each rank has 4 experts, and a 64th of everything else.
        wanted = sum(math.prod(each.shape) for each in held.parameters) // 64
        assert held.elements == wanted
        assert held.bytes == {
            "parameters": 4 * wanted, "gradients": 4 * wanted, "optimizer": 8 * wanted,
        }  # fmt: skip
        experts = [each for each in held.parameters if ".experts." in each.name]
        assert {each.local_shape[0] for each in experts} == {4}
        total += 64 * held.elements
    assert total == model.parameter_count()
    assert books.rank(1023).groups["ep"] == tuple(range(960, 1024))
    assert_as_real(model, books, parallel, 1024, 15 * 64 + 9)


def test_the_books_of_405b_need_less_than_2_gigabytes() -> None:
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from armillary.cli.main import main\n"
        "argv = 'mesh llama3-405b --world 512 --rank 300 --parallel.pp 8 --parallel.tp 8 "
        "--budget.microbatch-sequences 1 --json'\n"
        "assert main(argv.split()) == 0\n"
        # Not getrusage: what it tells begins with the memory of the process that forked this one.
        "status = Path('/proc/self/status').read_text()\n"
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', status)[1], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.splitlines()[-1]) < 2 * 2**20  # KiB


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    parallel = Parallel(dp_shard=2, tp=2)
    books = Account(TINY, parallel, AdamW(), 4, tuning=LoRA(rank=4))
    for rank in range(4):
        held = books.rank(rank)
        trained = sum(each.elements for each in held.parameters if is_factor(each.name))
        assert 0 < trained < held.elements
        assert held.bytes == {
            "parameters": 4 * held.elements, "gradients": 4 * trained, "optimizer": 8 * trained,
        }  # fmt: skip
