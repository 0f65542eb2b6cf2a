"""Weights of every family, in and out on every mesh, give the logits that transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.hugging_face.exporting import plan_export, write_export
from armillary.checkpoint.hugging_face.load import Loaded, load_weights
from armillary.checkpoint.hugging_face.own import checkpoint_sources
from armillary.checkpoint.hugging_face.source import Live, Tally
from armillary.checkpoint.hugging_face.weights import open_foreign, open_weights
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.store import CheckpointStore
from armillary.parallel import Parallel, Scale, process
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.parallelize import parallelize
from armillary.precision import Precision
from hugging_face_cases import CASES, ids, logits_of, write_model
from model_cases import relative_difference
from moe_cases import MOE_FAMILIES
from ranks import run_ranks

transformers = pytest.importorskip("transformers", minversion="5.0")

TOLERANCE = 1e-5
MESHES = {
    "fsdp4": Parallel(device="cpu"),
    "tp2": Parallel(device="cpu", tp=2),
    "pp2": Parallel(device="cpu", pp=2),
    "ep2": Parallel(device="cpu", ep=2),
}


DEFAULT = {"llama tied": ("fsdp4", "pp2"), "deepseek v3": ("fsdp4", "tp2", "ep2")}
"""What is loaded without `--full`: every mesh, and both kinds of models."""


def meshes_of(name: str, full: bool) -> dict[str, Parallel]:
    possible = {m: p for m, p in MESHES.items() if m != "ep2" or name in MOE_FAMILIES}
    return possible if full else {m: possible[m] for m in DEFAULT[name]}


def on_four_ranks(
    folder: str, names: list[str], full: bool
) -> dict[tuple[str, str], tuple[Tensor, Loaded]]:
    """Loads each case on each mesh, saves it, and returns the logits."""
    found = {}
    for name in names:
        config = CASES[name]
        for mesh_name, parallel in meshes_of(name, full).items():
            mesh = Mesh.create(parallel, process.choose_device("cpu"))
            with torch.device("meta"):
                whole = config.build()
            scale = Scale(parallel=parallel, precision=Precision(compute="float32"))
            model = parallelize(whole, mesh, scale)
            materialise(model, mesh.device, 0)
            ranks = Ranks()
            weights = open_weights(f"{folder}/{name}", config)
            loaded = load_weights(model, weights, ranks)
            place = Path(folder, f"{name} of {mesh_name}")
            with CheckpointStore(place, Checkpoint(asynchronous=False)) as store:
                store.save(1, gather_state(model), {"tokens_total": 0, "cursor": 0})
                store.wait(raise_failure=True)
            found[name, mesh_name] = (model.eval()(ids(2, 40)), loaded)
            ranks.close()
    return found


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_logits_are_those_of_transformers_in_and_out_on_every_mesh(
    full: bool, tmp_path: Path
) -> None:
    names = list(CASES if full else DEFAULT)
    theirs = {name: write_model(name, tmp_path / name) for name in names}
    expected = {name: logits_of(model, ids(2, 40)) for name, model in theirs.items()}
    found = run_ranks(on_four_ranks, 4, str(tmp_path), names, full, timeout=280)
    for name, model in theirs.items():
        for mesh_name in meshes_of(name, full):
            for rank in found:
                logits, _ = rank[name, mesh_name]
                difference = relative_difference(logits, expected[name])
                assert difference <= TOLERANCE, (name, mesh_name, difference)
            checkpoint = find_checkpoint(LocalPlace(tmp_path / f"{name} of {mesh_name}"), "auto")
            assert checkpoint is not None
            out = tmp_path / f"out {name} {mesh_name}"
            write_export(plan_export(CASES[name], checkpoint_sources(checkpoint, Tally())), out)
            again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
            assert_same_weights(again, model)
        total = sum(t.numel() * t.element_size() for t in model.state_dict().values())
        counts = found[0][name, "fsdp4"][1].bytes_read
        tied = CASES[name].tied_embeddings * model.lm_head.weight.nbytes
        # In GPT-OSS's files gate and up alternate, value by value: reading either reads both.
        once = total - tied if name != "gpt-oss" else sum(counts)
        assert sum(counts) == pytest.approx(once, rel=0.02), f"{name}: each byte is read once"
        assert max(counts) <= 0.30 * sum(counts), "a quarter by each, and what does not divide"


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ones, others = one.state_dict(), other.state_dict()
    assert ones.keys() == others.keys()
    different = [name for name in ones if not torch.equal(ones[name], others[name])]
    assert different == []


@pytest.mark.parametrize("name", CASES)
def test_logits_on_one_rank_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path / name)
    foreign = open_foreign(str(tmp_path / name))
    assert foreign.ignored == ()
    ours = foreign.model.build()
    load_weights(ours, open_weights(str(tmp_path / name), foreign.model), Ranks())
    tokens = ids(2, 150)  # past the original context of those that are stretched
    expected = logits_of(model, tokens)
    with torch.no_grad():
        assert relative_difference(ours.eval()(tokens), expected) <= TOLERANCE
    assert expected.std() > 0.3
    live = {n: Live(t) for n, t in gather_state(ours)["model"].items()}
    write_export(plan_export(foreign.model, live), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same_weights(again, model)
