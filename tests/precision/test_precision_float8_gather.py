"""Weights that travel in 8 bits: the same numbers as without, in half the bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from armillary.checkpoint.state import gather_state, restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.data.batch import Batch
from armillary.models.layers.documents import Documents
from armillary.models.llama import Llama
from armillary.optim.adamw import AdamW
from armillary.optim.optimizers import Optimizers
from armillary.parallel.activation_checkpoint_config import (
    ActivationCheckpointConfig,
    Full,
    NoCheckpoint,
    Offload,
)
from armillary.parallel.compile_config import Compile
from armillary.parallel.config import Parallel, Scale
from armillary.parallel.gradients import scale_and_clip
from armillary.parallel.layout import kept_tensor, local_tensor
from armillary.parallel.ledger import Ledger, Traffic
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import LOSS_AXES
from armillary.parallel.parallelize import parallelize
from armillary.precision import Precision
from armillary.precision.config import (
    Float8Rowwise,
    Float8RowwiseExactWeightGradient,
    Float8Tensorwise,
    LowPrecision,
    Mxfp8,
)
from armillary.precision.float8_weights import Float8Weight
from armillary.tasks.next_token import NextToken
from ranks import run_ranks

ROWS, LENGTH, STEPS = 12, 32, 5
WITHOUT = Float8Tensorwise()
WITH = dataclasses.replace(WITHOUT, float8_all_gather=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run varies, besides how weights travel."""

    parallel: Parallel = field(default_factory=Parallel)
    compute: str = "bfloat16"
    microbatches: int = 1
    checkpoint: ActivationCheckpointConfig = field(default_factory=NoCheckpoint)
    compiled: bool = False
    steps: int = STEPS
    layers: int = 2


ON_TWO = {
    "fsdp 2": Case(),
    "float32, summed once": Case(
        parallel=Parallel(sync_every_microbatch=False),
        compute="float32",
        microbatches=3,
        steps=2,
    ),
    "recomputed": Case(parallel=Parallel(cp=2, prefetch=0), checkpoint=Full(), steps=2),
}
COMPILED_ON_TWO = {"compiled": Case(compiled=True, steps=2)}
ON_FOUR = {
    "tp 2 x fsdp 2": Case(parallel=Parallel(tp=2)),
    "kept after forward, accumulated, activations on the host": Case(
        parallel=Parallel(dp_replicate=2, reshard_after_forward=False),
        microbatches=3,
        checkpoint=Offload(),
        steps=2,
    ),
    "pipeline, backward in two halves": Case(
        parallel=Parallel(pp=2, schedule="ZBVZeroBubble"), microbatches=6, steps=2, layers=4
    ),
}


class Run:
    """A model in training."""

    def __init__(self, case: Case, linears: Float8Tensorwise) -> None:
        torch.set_num_threads(1)
        self.case = case
        mesh = Mesh.create(dataclasses.replace(case.parallel, device="cpu"), torch.device("cpu"))
        with torch.device("meta"):
            whole = Llama(
                vocab_size=64,
                dim=64,
                n_layers=case.layers,
                n_heads=4,
                n_kv_heads=2,
                ffn_dim=128,
                max_seq_len=LENGTH,
            ).build()
        scale = Scale(
            parallel=case.parallel,
            precision=Precision(compute=case.compute, linears=linears),
            activation_checkpoint=case.checkpoint,
            compile=Compile(enabled=case.compiled, backend="aot_eager"),
        )
        self.model = parallelize(whole, mesh, scale)
        materialise(self.model, mesh.device, 0)
        self.optimizers: Optimizers = AdamW(lr=0.02).build(self.model)

    def step(self) -> float:
        """One step on the same rows everywhere; the loss before it."""
        loss = self.model.forward_backward(NextToken(), self.batches())
        scale_and_clip(self.model, ROWS * LENGTH, 1.0)
        self.optimizers.step()
        self.optimizers.zero_grad()
        return float(self.model.mesh.sum_over(loss, LOSS_AXES))

    def batches(self) -> list[Batch]:
        mesh = self.model.mesh
        tokens = torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        own = ROWS // mesh.data_size
        part = own // self.case.microbatches
        found = []
        for index in range(self.case.microbatches):
            start = mesh.data_rank * own + index * part
            rows = slice(start, start + part)
            documents = Documents.from_lengths([(LENGTH,)] * part)
            labels = tokens.roll(-1, 1)[rows]
            found.append(Batch(tokens[rows], labels, documents, tuple(range(ROWS)[rows])))
        return found

    def digest(self) -> str:
        """Of names, dtypes and bits of all that a checkpoint would hold of this rank."""
        found = hashlib.sha256()
        for part, tensors in gather_state(self.model, self.optimizers.optimizers).items():
            for name, tensor in sorted(tensors.items()):
                local = local_tensor(tensor)
                assert type(local) in (torch.Tensor, nn.Parameter), name
                found.update(f"{part}.{name} {local.dtype} {tuple(tensor.shape)}".encode())
                found.update(local.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Found:
    """What a run gave on a rank."""

    losses: list[float]
    evaluated: float
    digest: str
    gathered: int
    """Bytes that this rank sent in all-gathers over `fsdp`, in the second step."""
    weights: int
    """Numbers of the matrices in blocks, of which this rank holds a shard."""


def train(case: Case, linears: Float8Tensorwise) -> Found:
    run = Run(case, linears)
    losses = [run.step()]
    ledger = Ledger(run.model.mesh)
    with contextlib.nullcontext() if case.compiled else ledger:  # no compiler runs under a mode
        losses.append(run.step())
    losses += [run.step() for _ in range(case.steps - 2)]
    evaluated = run.model.evaluate(NextToken(), run.batches()[0])
    losses.append(run.step())  # the evaluation left nothing behind
    gathered = ledger.entries().get(("fsdp", "all-gather"), Traffic()).sent_bytes
    weights = sum(
        local_tensor(parameter).numel()
        for name, parameter in run.model.named_parameters()
        if name.startswith("layers.") and parameter.dim() == 2
    )
    return Found(losses, float(evaluated), run.digest(), gathered, weights)


def both(cases: dict[str, Case]) -> dict[str, tuple[Found, Found]]:
    """Each case without and with."""
    return {name: (train(case, WITHOUT), train(case, WITH)) for name, case in cases.items()}


def kept(folder: Path) -> tuple[list[str], list[float]]:
    """A checkpoint of a run without, read by one with, written again, and read without."""
    case = Case(parallel=Parallel())
    runs = [Run(case, linears) for linears in (WITHOUT, WITH, WITHOUT)]
    runs[0].step()
    digests = [runs[0].digest()]
    for index, (run, following) in enumerate(itertools.pairwise(runs)):
        with CheckpointStore(folder / str(index)) as store:
            state = gather_state(run.model, run.optimizers.optimizers)
            store.save(1, state, {"tokens_total": 1, "cursor": 1})
            store.wait(raise_failure=True)
            following.step()  # what is read replaces other weights, of which scales are known
            found = store.find("auto")
            assert found is not None
            restore_training(store, found, following.model, following.optimizers.optimizers)
        digests.append(following.digest())
    return digests, [run.step() for run in runs]


def seams() -> None:
    """What torch does with the local tensors, and what the model shows while it is gathered."""
    run = Run(Case(), WITH)
    block = run.model.parts[0].get_submodule("layers.0")
    query = block.get_submodule("attention.query")
    seen: list[Tensor] = []
    handle = query.register_forward_pre_hook(
        lambda module, args: seen.append(module.get_parameter("weight"))
    )
    unused = AssertionError("the product takes 8 bits as they are")
    with mock.patch.object(Float8Weight, "numbers", side_effect=unused):
        run.step()
        run.model.evaluate(NextToken(), run.batches()[0])
    handle.remove()
    assert seen[0] is seen[1], "one object, written to again"
    assert isinstance(seen[0], Float8Weight)
    assert seen[0].dtype == torch.bfloat16, seen[0].dtype
    parameter = query.get_parameter("weight")
    with torch.no_grad():
        assert hasattr(kept_tensor(parameter), "fsdp_pre_all_gather")
    assert not hasattr(local_tensor(parameter.detach()), "fsdp_pre_all_gather")
    with torch.no_grad():
        kept_tensor(parameter)[0, :1] = torch.nan if run.model.mesh.is_main else 1.0
        seen.clear()
        query.register_forward_hook(lambda module, args, y: seen.append(y))
        run.model.evaluate(NextToken(), run.batches()[0])
    assert seen[0].isnan().all(), "on both ranks, and all numbers that share the scale"
    norm = block.get_parameter("attention_norm.weight")
    assert not hasattr(kept_tensor(norm), "fsdp_pre_all_gather")


@pytest.mark.parametrize(
    "cases",
    [ON_TWO, ON_FOUR, pytest.param(COMPILED_ON_TWO, marks=pytest.mark.full)],
    ids=["two ranks", "four ranks", "compiled"],
)
def test_numbers_are_those_of_weights_gathered_whole_and_bytes_are_fewer(
    cases: dict[str, Case],
) -> None:
    for found in run_ranks(both, 4 if cases is ON_FOUR else 2, cases):
        for name, (without, with_) in found.items():
            assert with_.losses == without.losses, name
            assert without.losses[-1] < without.losses[0], name
            assert (with_.evaluated, with_.digest) == (without.evaluated, without.digest), name
        name = next(iter(cases))
        without, with_ = found[name]
        # Each number goes to the other rank for the forward and for the backward pass.
        assert without.gathered - with_.gathered == 2 * without.weights, name


def test_shards_of_unequal_length_travel_too() -> None:
    for without, with_ in run_ranks(unequal, 3):
        assert with_.gathered < without.gathered
        assert with_ == dataclasses.replace(without, gathered=with_.gathered)


def unequal() -> tuple[Found, Found]:
    """On three ranks, of which the last has fewer rows of every matrix."""
    case = Case(steps=2)
    return train(case, WITHOUT), train(case, WITH)


def test_checkpoints_are_the_same_with_and_without(tmp_path: Path) -> None:
    for digests, losses in run_ranks(kept, 2, tmp_path):
        assert len({*digests}) == 1 and len({*losses}) == 1


def test_the_extension_is_where_torch_looks_for_it() -> None:
    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
    run_ranks(seams, 2)


def test_a_gathered_weight_is_a_plain_tensor_to_all_other_operations() -> None:
    values = torch.tensor([[1.0, -448.0], [0.5, 0.0]]).to(torch.float8_e4m3fn)
    weight = Float8Weight(values.view(torch.uint8), torch.tensor(0.25), torch.bfloat16)
    assert type(weight.detach()) is Float8Weight and weight.to(torch.bfloat16) is weight
    assert type(weight + 0) is torch.Tensor
    assert (weight + 0).tolist() == weight.float().tolist() == [[0.25, -112.0], [0.125, 0.0]]
    assert weight.t()[0].tolist() == [0.25, 0.125] and "2, 2" in repr(weight)
    with pytest.raises(AssertionError, match="would write"):
        weight.add_(1)


@pytest.mark.parametrize("recipe", [Float8Rowwise, Float8RowwiseExactWeightGradient, Mxfp8])
def test_other_recipes_have_no_one_form_to_send(recipe: type[LowPrecision]) -> None:
    assert not WITH.problems() and not recipe().problems()
    (problem,) = recipe(float8_all_gather=True).problems()
    assert "more than one way" in problem.message
