"""From a run folder to text: which checkpoint is taken, what is refused, what is printed."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.store import CheckpointStore
from armillary.cli.main import main
from armillary.data.config import Data
from armillary.data.tokenizer import save_tokenizer
from armillary.data.tokenizer_bytes import Bytes, ByteTokenizer
from armillary.foundation.errors import UserError
from armillary.inference.generate import generate
from armillary.inference.load import load_trained, round_parameters
from armillary.models import Llama
from armillary.recipe import Recipe, to_toml
from model_cases import build
from moe_cases import MOE_FAMILIES, build_moe

MODEL = Llama(
    vocab_size=320, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=128,
    tied_embeddings=True,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "tiny"
    run.mkdir()
    recipe = Recipe(model=MODEL)
    recipe = replace(recipe, data=replace(recipe.data, tokenizer=Bytes()))
    (run / "recipe.toml").write_text(to_toml(recipe))
    save_tokenizer(ByteTokenizer(), run / "tokenizer")
    with CheckpointStore(run / "checkpoints", Checkpoint(keep_last=3, asynchronous=False)) as store:
        for step in (2, 4):
            store.save(step, gather_state(build(MODEL, seed=step)), {"step": step})
    return run


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_run, tmp_path / "tiny"))


def test_a_run_loads_as_the_model_that_was_saved(run: Path) -> None:
    newest = load_trained(run, device=CPU)
    assert newest.checkpoint.step == 4
    assert newest.model.head.weight is newest.model.embedding.weight
    for (name, loaded), saved in zip(
        newest.model.named_parameters(), build(MODEL, seed=4).parameters(), strict=True
    ):
        assert torch.equal(loaded, saved), name
    folder = run / "checkpoints" / "step-00000002"
    for older in (load_trained(run, step=2, device=CPU), load_trained(folder, device=CPU)):
        assert Path(older.checkpoint.path).samefile(folder)
        assert torch.equal(older.model.norm.weight, build(MODEL, seed=2).norm.weight)
    tokenizer = newest.tokenizer
    assert newest.encode("ab") == [tokenizer.bos_id, *tokenizer.encode("ab")]


def test_a_run_with_experts_loads_with_its_selection_biases(tmp_path: Path) -> None:
    run = tmp_path / "experts"
    run.mkdir()
    recipe = Recipe(model=replace(MOE_FAMILIES["deepseek v3"], predict_ahead=True))
    (run / "recipe.toml").write_text(to_toml(replace(recipe, data=Data(tokenizer=Bytes()))))
    save_tokenizer(ByteTokenizer(), run / "tokenizer")
    saved = build_moe(recipe.model)
    with CheckpointStore(run / "checkpoints", Checkpoint(asynchronous=False)) as store:
        store.save(1, gather_state(saved), {"step": 1})
    model = load_trained(run, device=CPU).model
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert len(dict(model.named_buffers())) == 3
    tokens = generate(model, [[1, 2, 3], [4]], max_new_tokens=4, temperature=0)
    assert tokens == generate(saved, [[1, 2, 3], [4]], max_new_tokens=4, temperature=0)


@torch.no_grad()
def test_parameters_are_rounded_to_the_runs_format_and_selection_biases_are_not() -> None:
    model, exact = (build_moe(MOE_FAMILIES["deepseek v3"]) for _ in range(2))
    round_parameters(model, torch.bfloat16)
    for (name, rounded), own in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(rounded, own.bfloat16()), name
    for (name, kept), own in zip(model.named_buffers(), exact.buffers(), strict=True):
        assert torch.equal(kept, own), name
    assert model(torch.tensor([[1, 2, 3]])).dtype == torch.bfloat16


def test_a_damaged_newest_checkpoint_is_passed_over_and_said_so(run: Path) -> None:
    (run / "checkpoints" / "step-00000004" / "state.json").write_text("{}")
    trained = load_trained(run, device=CPU)
    assert trained.checkpoint.step == 2
    assert re.match(r"skipped .*step-00000004: state.json", trained.checkpoint.reasons[0])
    with pytest.raises(UserError, match="step-00000004 does not verify"):
        load_trained(run, step=4, device=CPU)


def test_what_is_no_run_or_has_no_such_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint of step 3\n.*allowed: steps 2, 4"):
        load_trained(run, step=3, device=CPU)
    with pytest.raises(UserError, match="is the checkpoint of step 2"):
        load_trained(run / "checkpoints" / "step-00000002", step=4, device=CPU)
    with pytest.raises(UserError, match="not a run folder"):
        load_trained(tmp_path, device=CPU)
    with pytest.raises(UserError, match="does not exist"):
        load_trained(tmp_path / "nowhere", device=CPU)
    with pytest.raises(UserError, match="is not a folder"):
        load_trained(run / "recipe.toml", device=CPU)
    shutil.rmtree(run / "checkpoints")
    again = f"try: armillary train --from-file {run / 'recipe.toml'} --run {run}"
    with pytest.raises(UserError, match=f"has no checkpoint yet(?s:.*){re.escape(again)}"):
        load_trained(run, device=CPU)
    shutil.rmtree(run / "tokenizer")


def test_the_command_prints_the_texts_of_the_model(
    saved_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = load_trained(saved_run, device=CPU)
    prompts = [trained.encode(text) for text in ("def ", "x")]
    ends = {"eos_id": trained.tokenizer.eos_id, "vocab_size": trained.tokenizer.vocab_size}
    expected = generate(trained.model, prompts, max_new_tokens=6, temperature=0, **ends)
    options = [str(saved_run), "--max-new-tokens", "6", "--temperature", "0"]
    assert main(["generate", *options, "--prompt", "def ", "--prompt", "x", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["seed"], document["max_new_tokens"]) == (4, 0, 6)
    assert [each["tokens"] for each in document["texts"]] == expected
    assert document["texts"][0]["prompt"] == "def "
    texts = [trained.tokenizer.decode(row) for row in expected]
    assert [each["text"] for each in document["texts"]] == texts

    assert main(["generate", *options, "--prompt", "def "]) == 0
    assert capsys.readouterr().out == f"def {texts[0]}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("def \nx\n"))
    assert main(["generate", *options, "--prompt", "-"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"--- 1 of 2\ndef {texts[0]}\n--- 2 of 2\nx{texts[1]}\n"
    assert main(["generate", *options]) == 0

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "named").symlink_to(saved_run)
    capsys.readouterr()
    assert main(["generate", "named", *options[1:], "--prompt", "def "]) == 0
    assert capsys.readouterr().out == f"def {texts[0]}\n"
    assert main(["generate", "nowhere"]) == 2
    assert "try: armillary runs list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature = -1.0 is out of range"),
        (["--top-p", "2", "--top-k", "-1"], "top_p = 2.0 is out of range"),
        (["--prompt", "x" * 200], "prompt 0 of 201 tokens"),
        (["--prompt", "\udcff"], "is not UTF-8 text"),
        (["--step", "7"], "no checkpoint of step 7"),
        (["--max-new-tokens", "many"], "invalid int value"),
        (["--promt", "x"], "there is no --promt"),
    ],
)
def test_wrong_input_ends_with_code_2_and_harms_nothing(
    saved_run: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    before = sorted(saved_run.rglob("*"))
    assert main(["generate", str(saved_run), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    assert sorted(saved_run.rglob("*")) == before
