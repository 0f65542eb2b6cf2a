"""A checkpoint knows no mesh: written on one, it is read on any other, bit for bit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import Case, batches, built
from torch.distributed.tensor import DTensor

from armillary.checkpoint.state import gather_state, restore_model, restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.checkpoint.tensors import logical_bytes, stored_tensors
from armillary.foundation.errors import UserError
from armillary.optim.adamw import AdamW
from armillary.optim.muon import Muon
from armillary.optim.optimizers import Optimizers
from armillary.parallel import Parallel, Scale
from armillary.parallel.gradients import scale_and_clip
from armillary.parallel.layout import local_tensor
from armillary.parallel.model import LOSS_AXES, ParallelModel
from armillary.precision import Precision
from armillary.tasks.next_token import NextToken
from ranks import run_ranks

FP32 = Precision(compute="float32")
MESHES = {
    "tied": {
        "HSDP 2x2": Parallel(dp_replicate=2),
        "TP 2 x FSDP 2": Parallel(tp=2),
        "PP 2 x FSDP 2": Parallel(pp=2),
    },
    "experts": {
        "EP 2 x FSDP 2": Parallel(ep=2),
        "TP 2 x EP 2 x expert TP 2": Parallel(tp=2, ep=2, expert_tp=2),
        "PP 2 x TP 2": Parallel(pp=2, tp=2),
    },
}


def case_of(model: str, parallel: Parallel) -> Case:
    scale = Scale(precision=FP32, parallel=parallel)
    return Case(scale=scale, tied=model == "tied", experts=model == "experts", microbatches=2)


@dataclass
class Run:
    """A model in training."""

    model: ParallelModel
    optimizers: Optimizers

    @classmethod
    def of(cls, case: Case) -> Run:
        model = built(case)
        # AdamW's state is of every parameter's shape, Muon's of matrices and stacks of them.
        config = AdamW() if case.tied else Muon(ns_dtype="float32")
        return cls(model, config.build(model))

    def step(self) -> float:
        """One step on the same rows everywhere; the loss before it."""
        microbatches, weight = batches(self.model, 2)
        loss = self.model.forward_backward(NextToken(), microbatches)
        scale_and_clip(self.model, weight, 1.0)
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.model.end_step()
        return float(self.model.mesh.sum_over(loss, LOSS_AXES)) / weight

    def digests(self) -> dict[str, str]:
        """SHA-256 of every tensor of model and optimizers, whole, of all stages."""
        own = {}
        for part, tensors in gather_state(self.model, self.optimizers.optimizers).items():
            for name, tensor in tensors.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                data = whole.detach().contiguous().numpy().tobytes()
                own[f"{part}.{name}"] = hashlib.sha256(data).hexdigest()
        stages = [own]
        if (group := self.model.mesh.group("pp")) is not None:
            stages = [{} for _ in range(group.size())]
            dist.all_gather_object(stages, own, group=group)
        merged: dict[str, str] = {}
        for stage in stages:
            for name, digest in stage.items():
                assert merged.setdefault(name, digest) == digest, f"stages differ in {name}"
        return merged


Written = tuple[dict[str, str], float]


def write(folder: Path, case: Case) -> Written:
    """Two steps, a checkpoint, and the loss after it."""
    run = Run.of(case)
    run.step(), run.step()
    digests = run.digests()
    events: list[dict[str, Any]] = []
    with CheckpointStore(folder, on_event=lambda _, fields: events.append(fields)) as store:
        store.save(
            2, gather_state(run.model, run.optimizers.optimizers), {"tokens_total": 1, "cursor": 2}
        )
        store.wait_until_staged()
        loss = run.step()  # the staged copy does not follow
        store.wait(raise_failure=True)
    if run.model.mesh.is_main:
        staged = [fields["bytes"] for fields in events if fields["state"] == "staged"]
        assert staged == [logical_bytes(stored_tensors(store.place, "step-00000002"))], (
            "of all stages"
        )
    return digests, loss


def read(folder: Path, case: Case) -> Written:
    """The state of a checkpoint, and the loss that comes next."""
    run = Run.of(case)
    with torch.no_grad():
        for parameter in run.model.parameters():
            local_tensor(parameter).fill_(7.0)
    with CheckpointStore(folder) as store:
        found = store.find("auto")
        assert found is not None
        restore_model(found, run.model)
        weights = run.digests()
        restore_training(store, found, run.model, run.optimizers.optimizers)
    digests = run.digests()
    for name, digest in weights.items():
        assert digests[name] == digest, f"{name}, read without optimizer"
    return digests, run.step()


def on_all_meshes(folder: Path, model: str) -> dict[str, list[Written]]:
    """What each mesh wrote, and what the next one, and one after a single process, read of it."""
    names = list(MESHES[model])
    written = {
        name: write(folder / name, case_of(model, parallel))
        for name, parallel in MESHES[model].items()
    }
    found = {}
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        case = case_of(model, MESHES[model][following])
        found[name] = [written[name], read(folder / name, case), read(folder / "alone", case)]
    if model == "tied":
        with pytest.raises(UserError, match="lacks tensors"):
            read(folder / names[0], case_of("experts", Parallel(pp=2)))
    return found


@pytest.mark.parametrize("model", MESHES)
def test_checkpoints_cross_meshes_bit_for_bit_and_training_goes_on(
    model: str, tmp_path: Path
) -> None:
    alone = case_of(model, Parallel())
    own, expected = write(tmp_path / "alone", alone)
    found = run_ranks(on_all_meshes, 4, tmp_path, model)
    assert found[0] == found[1] == found[2] == found[3]
    for name, (written, by_another, of_one_process) in found[0].items():
        assert written[0].keys() == own.keys(), name
        assert by_another[0] == written[0], name
        assert read(tmp_path / name, alone)[0] == written[0], name
        assert of_one_process[0] == own, name
        for _, loss in (written, by_another, of_one_process):
            assert loss == pytest.approx(expected, rel=1e-6), name
