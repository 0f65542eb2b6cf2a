"""`armillary checkpoints`: what is there, whether it is whole, what differs, what goes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.checkpoint.compare import distance
from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.retention import shelved_in
from armillary.checkpoint.store import CheckpointStore
from armillary.cli.main import main
from armillary.resilience.claim import claim_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "recipe.toml").write_text("seed = 1\n")
    config = Checkpoint(keep_last=9, keep_every=20, ephemeral_every=15)
    with CheckpointStore(run / "checkpoints", config) as store:
        for step in (10, 20, 30):
            tensors = {
                "same": torch.ones(3, dtype=torch.bfloat16),
                "moves": torch.full((4,), float(step)),
                f"of_{step}": torch.zeros(2),
                "shape": torch.zeros(step),
            }
            scores = {"validation": 1.0 + step / 100}
            store.save(step, {"model": tensors}, {"tokens_total": step}, b"", {"scores": scores})
            store.wait()
    return run


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    capsys.readouterr()
    code = main(["checkpoints", *map(str, words), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["checkpoints", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_list_shows_every_checkpoint_its_kind_its_score_and_its_damage(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "checkpoints" / "step-00000020" / "manifest.json").write_text("{}")
    assert call(capsys, "pin", run, 10)[0] == 0
    code, document = call(capsys, "list", run)
    assert code == 0
    assert [(e["step"], e["kind"], e["pinned"]) for e in document] == [
        (10, "kept", True),
        (20, "damaged", False),
        (30, "ephemeral", False),
    ]
    assert document[2]["scores"] == {"validation": 1.3} and document[2]["tokens_total"] == 30
    code, text = told(capsys, "list", run / "checkpoints" / "step-00000010")
    assert code == 0 and "kept, pinned" in text and "step-00000030" not in text
    monkeypatch.chdir(run.parent)
    (run.parent / "runs").mkdir()
    (run.parent / "runs" / "named").symlink_to(run)
    assert "step-00000030" in told(capsys, "list", "named")[1]
    assert told(capsys, "list", "nowhere")[0] == 2


def test_a_run_whose_recipe_names_another_folder_is_looked_for_there(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    elsewhere = (run / "checkpoints").rename(tmp_path / "big disk")
    recipe = f'[checkpoint]\nfolder = "{elsewhere}"\n'
    (tmp_path / "other" / "recipe.toml").write_text(recipe)
    assert len(call(capsys, "list", tmp_path / "other")[1]) == 3


def test_verify_reads_all_files_and_fails_with_the_damaged_ones_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = call(capsys, "verify", run)
    assert code == 0 and [e["verifies"] for e in document] == [True] * 3
    (run / "checkpoints" / "step-00000020" / "state.json").write_text("{ }")
    code, document = call(capsys, "verify", run)
    assert code == 1 and [e["verifies"] for e in document] == [True, False, True]
    assert document[1]["reason"].startswith("state.json has 3 bytes")
    code, text = told(capsys, "verify", run / "checkpoints" / "step-00000010")
    assert code == 0 and text.startswith("step-00000010  verifies: 4 files")


def test_diff_names_what_differs_and_by_how_much(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run / "checkpoints" / "step-00000010"
    code, document = call(capsys, "diff", first, run)  # of a run, its newest
    assert code == 0
    assert document["second"].endswith("step-00000030")
    assert document["fields"]["step"] == [10, 30]
    assert document["only_first"] == ["model.of_10"]
    assert document["only_second"] == ["model.of_30"]
    assert document["other_shape"] == ["model.shape"]
    assert document["tensors"] == [{"name": "model.moves", "largest": 20.0, "relative": 2.0}]
    assert document["equal_tensors"] == 1
    assert "1 tensors are equal, 1 differ" in told(capsys, "diff", first, run)[1]
    assert call(capsys, "diff", first, first)[1]["equal_tensors"] == 4


def test_the_distance_of_tensors_is_that_of_float64_and_shows_what_is_not_a_number() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(50, 3), torch.randn(50, 3)
    wide = a.double() - b.double()
    largest, relative = distance(a, b)
    assert largest == float(wide.abs().max())
    assert relative == pytest.approx(float(wide.norm() / a.double().norm()), rel=1e-12)
    assert distance(torch.zeros(2), torch.ones(2)) == (1.0, float("inf"))
    assert distance(torch.zeros(0), torch.zeros(0)) == (0.0, 0.0)
    a[3, 1] = float("nan")
    assert all(map(math.isnan, distance(a, b)))


def test_prune_removes_what_is_not_to_be_kept_and_no_pinned_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def left() -> list[int]:
        from armillary.checkpoint.places.local import LocalPlace

        return sorted(each.step for each in shelved_in(LocalPlace(run / "checkpoints")))

    code, text = told(capsys, "prune", run, "--keep-last", 1, "--dry-run")
    assert code == 0 and text.splitlines()[0].startswith("would remove step-00000010")
    assert left() == [10, 20, 30]
    with claim_run(run):  # one that is going on
        code, text = told(capsys, "prune", run, "--keep-last", 1)
        assert code == 2 and "in use by process" in text
    assert call(capsys, "pin", run, 10)[1] == {"pinned": [10]}
    assert told(capsys, "prune", run, "--keep-last", 1)[0] == 0
    assert left() == [10, 20, 30]  # pinned, permanent, newest
    assert call(capsys, "pin", run / "checkpoints" / "step-00000010", "--unpin")[1] == {
        "pinned": []
    }
    code, document = call(capsys, "prune", run, "--keep-last", 1)
    assert [Path(e["path"]).name for e in document] == ["step-00000010"]
    assert left() == [20, 30]
    code, text = told(capsys, "pin", run, 10)
    assert code == 2 and "no checkpoint of step 10" in text and "allowed: steps 20, 30" in text
    assert told(capsys, "prune", run, "--keep-last", 0)[0] == 2
    (run / "checkpoints" / "pins.json").write_text("?")
    code, text = told(capsys, "prune", run)
    assert code == 2 and "nothing was removed: pins.json" in text


def test_prune_goes_by_the_recipe_of_the_run_unless_told_otherwise(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def gone(*words: object) -> list[str]:
        document = call(capsys, "prune", *words, "--dry-run")[1]
        return [Path(each["path"]).name for each in document]

    kept = 'keep_last = 1\nkeep_best = 1\nbest_metric = "validation"\n'
    (run / "recipe.toml").write_text(f'[checkpoint]\n{kept}[model]\nkind = "of a file elsewhere"\n')
    assert gone(run) == gone(run / "checkpoints") == []  # step 10 is the best
    assert gone(run, "--keep-best", 0) == ["step-00000010"]
    assert gone(run, "--best-metric", "another") == ["step-00000010"]
    (run / "recipe.toml").write_text("[checkpoint]\nkeep_last = 1\n")
    assert gone(run) == ["step-00000010"]
    assert gone(run, "--keep-every", 10) == []
    assert "belongs to no run" not in told(capsys, "prune", run, "--dry-run")[1]
    code, text = told(capsys, "prune", run, "--keep-last", 0)
    assert code == 2 and "try: --keep-last 1" in text and "checkpoint." not in text
    plain = (run / "checkpoints").rename(tmp_path / "plain")
    code, text = told(capsys, "prune", plain, "--dry-run")
    assert code == 0 and "belongs to no run" in text
    assert "--keep-last 2 --keep-every 0 --keep-best 0 --best-metric validation" in text


def test_where_there_is_nothing_the_folder_that_was_looked_at_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other, elsewhere = tmp_path / "other", tmp_path / "elsewhere"
    other.mkdir()
    code, text = told(capsys, "verify", other)
    assert code == 1 and f"no checkpoints in {other}" in text
    code, text = told(capsys, "list", other)
    assert code == 2 and f"{other} is neither a run nor a folder of checkpoints" in text
    (other / "recipe.toml").write_text(f'[checkpoint]\nfolder = "{elsewhere}"\n')
    code, text = told(capsys, "verify", other)  # which was never made, or is not mounted
    assert code == 1 and f"no checkpoints in {elsewhere}" in text
    assert told(capsys, "list", other) == (0, f"no checkpoints in {elsewhere} yet\n")
    for action in ("list", "verify", "prune", "pin"):
        code, text = told(capsys, action, "")
        assert code == 2 and "the name of the run is empty" in text
    (run / "checkpoints" / "step-00000030").rename(
        run / "checkpoints" / "set-aside-step-00000030-a"
    )
    text = told(capsys, "list", run)[1]
    assert text.endswith("no longer of the run, 1 set aside: set-aside-*\n")
    assert "set aside" not in told(capsys, "list", run / "checkpoints" / "step-00000010")[1]


def test_a_store_that_lets_nobody_in_is_told_with_where_credentials_come_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "PROFILE", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(tmp_path / "none"))
    for address in ("s3://bucket/run", "s3://bucket/run/step-00000010"):
        code, text = told(capsys, "list", address)
        assert code == 2 and "s3://bucket/run cannot be read: NoCredentialsError" in text
        assert "AWS_ACCESS_KEY_ID" in text and "unexpected" not in text
    capsys.readouterr()
    typed = ["train", "debug", "--run", str(tmp_path / "run"), "--telemetry.console", "plain"]
    assert main([*typed, "--checkpoint.folder", "s3://bucket/run"]) == 2
    text = capsys.readouterr().err
    assert "s3://bucket/run cannot be read: NoCredentialsError" in text and "AWS_PROFILE" in text
