"""Optimizers: who decays, who is orthogonalised, what is fp32, and the same on every mesh."""

import os

import pytest
import torch
from optim_toy import Toy, backward, rows_of, shard
from torch.distributed.tensor import distribute_tensor

from armillary.checkpoint.state import gather_state
from armillary.foundation.component import choices_of
from armillary.foundation.errors import UserError
from armillary.optim.adamw import FUSED_DEVICES, AdamW
from armillary.optim.config import OptimizerConfig
from armillary.optim.gathered_muon import GatheredMuon, Whole, orthogonalise
from armillary.optim.muon import Muon
from armillary.optim.optimizers import Optimizers
from armillary.parallel.layout import local_tensor
from armillary.parallel.model import ParallelModel
from ranks import run_ranks

BOTH = pytest.mark.parametrize("config", [AdamW(), Muon()], ids=["adamw", "muon"])


def names_by_decay(model: Toy, optimizer: torch.optim.Optimizer) -> dict[float, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        group["weight_decay"]: {names[id(p)] for p in group["params"]}
        for group in optimizer.param_groups
    }


def train(
    config: OptimizerConfig, model: Toy | ParallelModel, steps: int, rows: slice = slice(None)
) -> Optimizers:
    optimizers = config.build(model)
    for step in range(steps):
        optimizers.set_factor(1 / (step + 1))
        backward(model, rows, seed=step)
        optimizers.step()
        optimizers.zero_grad()
    return optimizers


def moments_of(optimizers: Optimizers, model: Toy | ParallelModel) -> dict[str, torch.Tensor]:
    """State tensors by `<parameter>.<quantity>`."""
    return gather_state(model, optimizers.optimizers)["optimizer"]


def test_norms_biases_and_embeddings_do_not_decay_by_default() -> None:
    model = Toy()
    (adamw,) = AdamW(weight_decay=0.3).build(model).optimizers
    matrices = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down", "mix")}
    matrices |= {f"layers.{i}.experts.up" for i in (0, 1)}
    groups = names_by_decay(model, adamw)
    assert groups[0.3] == matrices | {"head.weight"}
    assert groups[0.0] == {n for n, _ in model.named_parameters()} - groups[0.3]


def test_adamw_is_fused_where_torch_says_it_can_be() -> None:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
    assert set(FUSED_DEVICES) <= set(_get_fused_kernels_supported_devices())
    assert AdamW().build(Toy()).optimizers[0].defaults["fused"] is True


def test_patterns_choose_what_decays() -> None:
    model = Toy()
    (adamw,) = AdamW(no_decay=("layers.0.*", "*bias")).build(model).optimizers
    assert names_by_decay(model, adamw)[0.0] == {
        name
        for name, _ in model.named_parameters()
        if name.startswith("layers.0.") or "bias" in name
    }
    (everything,) = AdamW(no_decay=()).build(model).optimizers
    assert list(names_by_decay(model, everything)) == [0.1]


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = Toy()
    muon, adamw = Muon().build(model).optimizers
    names = names_by_decay(model, muon)
    assert names == {
        0.1: {
            f"layers.{i}.{name}"
            for i in (0, 1)
            for name in ("up.weight", "down.weight", "mix.weight", "experts.up")
        }
    }
    rest = names_by_decay(model, adamw)
    assert rest[0.1] == {"head.weight"}
    assert set().union(*names.values(), *rest.values()) == {n for n, _ in model.named_parameters()}


@BOTH
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(config) -> None:
    from dataclasses import replace

    with pytest.raises(UserError) as caught:
        replace(config, no_decay=("layers.0.nrom.weight", "xyz*")).build(Toy())
    problems = caught.value.problems
    assert len(problems) == 2
    assert "'layers.0.nrom.weight' matches no parameter" in problems[0].message
    assert "layers.0.norm.weight" in problems[0].allowed
    with pytest.raises(UserError, match="no parameter"):
        Muon(matrices=("blocks.*",)).build(Toy())


def test_values_out_of_range_are_refused_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        AdamW(lr=0.0, betas=(1.0, 0.9), eps=-1.0, weight_decay=-0.1).build(Toy())
    assert len(caught.value.problems) == 4
    bad = Muon(lr=-1, momentum=1.0, ns_steps=0, adjust_lr="rms", ns_dtype="fp8", adamw_lr=0)
    assert len(bad.problems()) == 6
    assert AdamW().problems() == Muon().problems() == []


@BOTH
def test_an_update_of_1e_5_moves_float32_weights_and_state_is_float32(config) -> None:
    model = Toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0).add_(torch.rand_like(parameter), alpha=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = config.build(model)
    optimizers.set_factor(1e-5 / config.lr)
    backward(model, slice(None))
    optimizers.step()
    moved = [n for n, p in model.named_parameters() if p.grad.any() and not p.equal(before[n])]
    assert moved == [n for n, p in model.named_parameters() if p.grad.any()]
    assert {value.dtype for value in moments_of(optimizers, model).values()} == {torch.float32}


@BOTH
def test_the_factor_scales_every_groups_own_rate(config) -> None:
    optimizers = config.build(Toy())
    base = [g["lr"] for o in optimizers.optimizers for g in o.param_groups]
    for factor in (0.5, 0.1, 1.0):
        optimizers.set_factor(factor)
        rates = [g["lr"] for o in optimizers.optimizers for g in o.param_groups]
        assert rates == [rate * factor for rate in base]
        assert optimizers.learning_rate == config.lr * factor


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_gathered_muon_is_torchs_muon_bit_for_bit(adjust_lr: str, nesterov: bool) -> None:
    torch.manual_seed(0)
    shapes = [(7, 7), (5, 12), (12, 5)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.02, "adjust_lr_fn": adjust_lr, "nesterov": nesterov, "ns_steps": 4}
    names = {p: str(index) for index, p in enumerate(ours)}
    gathered = GatheredMuon(ours, names=names, held=Whole(), **options)
    stock = torch.optim.Muon(theirs, **options)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        gathered.step()
        stock.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(
            gathered.state[mine]["momentum_buffer"], stock.state[other]["momentum_buffer"]
        )


def test_a_stack_is_updated_as_its_matrices_would_be() -> None:
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 8, 5))
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stack.grad = torch.randn_like(stack)
    for matrix, gradient in zip(alone, stack.grad, strict=True):
        matrix.grad = gradient.clone()
    for parameters in ([stack], alone):
        names = {p: str(index) for index, p in enumerate(parameters)}
        options = {"lr": 0.02, "ns_dtype": torch.float32, "adjust_lr_fn": "match_rms_adamw"}
        GatheredMuon(parameters, names=names, held=Whole(), **options).step()
    assert torch.allclose(stack, torch.stack(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_orthogonalising_brings_singular_values_near_one(dtype: torch.dtype) -> None:
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    for x in (matrix, matrix.T):
        values = torch.linalg.svdvals(orthogonalise(x, steps=5, dtype=dtype).float())
        assert values.min() > 0.6
        assert values.max() < 1.25
    assert not orthogonalise(torch.zeros(3, 4), steps=5, dtype=dtype).any()


def trained_on_a_mesh(config: OptimizerConfig, replicate: int):
    world_size = int(os.environ["WORLD_SIZE"])
    model = shard(Toy(), replicate)
    optimizers = train(config, model, 5, rows_of(int(os.environ["RANK"]), world_size))
    return tuple(
        {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in tensors.items()}
        for tensors in gather_state(model, optimizers.optimizers).values()
    )


@pytest.mark.parametrize(("replicate", "shards"), [(1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("config", [AdamW(), Muon(ns_dtype="float32")], ids=["adamw", "muon"])
def test_training_does_not_depend_on_the_mesh(config, replicate: int, shards: int) -> None:
    model = Toy()
    state = moments_of(train(config, model, 5), model)
    for weights, moments in run_ranks(trained_on_a_mesh, replicate * shards, config, replicate):
        for name, parameter in model.named_parameters():
            assert torch.allclose(weights[name], parameter, rtol=1e-5, atol=2e-6), name
        assert moments.keys() == state.keys()
        for name, value in state.items():
            assert torch.allclose(moments[name], value, rtol=1e-4, atol=1e-5), name


def muon_update_of_given_gradients() -> bool:
    """Muon on the whole matrices against Muon on shards, given the same gradients.

    (AdamW's last elements are not those of vectors of the same length; of a stack, fewer matrices
    are multiplied at once.)
    """
    whole, sharded = Toy(), shard(Toy(), 1)
    config = Muon(adjust_lr="original")
    optimizers = [config.build(whole), config.build(sharded)]
    parts = dict(sharded.named_parameters())
    for step in range(3):
        torch.manual_seed(step)
        for name, plain in whole.named_parameters():
            plain.grad = torch.randn_like(plain)
            split = parts[name]
            split.grad = distribute_tensor(plain.grad, split.device_mesh, split.placements)
        for each in optimizers:
            each.step()
    return all(
        torch.equal(sharded.own_part(name, plain), local_tensor(parts[name]))
        for name, plain in whole.named_parameters()
        if name.startswith("layers.") and plain.ndim == 2 and name.endswith("weight")
    )


def test_sharded_muon_equals_that_of_whole_matrices_bit_for_bit() -> None:
    assert run_ranks(muon_update_of_given_gradients, 2) == [True, True]


def test_optimizers_can_be_chosen_by_name() -> None:
    assert choices_of(OptimizerConfig) == {"adamw": AdamW, "muon": Muon}
