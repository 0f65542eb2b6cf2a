"""`armillary import` and `export`: from transformers and back, and what generation says of it."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.checkpoint.hugging_face import exporting
from armillary.checkpoint.hugging_face.exporting import plan_export, write_export
from armillary.checkpoint.hugging_face.families import FAMILIES
from armillary.checkpoint.hugging_face.source import Live
from armillary.checkpoint.hugging_face.table import Reorder, Rule
from armillary.checkpoint.hugging_face.weights import our_shapes
from armillary.cli.main import main
from hugging_face_cases import CASES, TEMPLATE, TOKENS, VOCABULARY, write_model

transformers = pytest.importorskip("transformers", minversion="5.0")

PROMPT = "the sky above"
NEW = 64


class Overheard(logging.Handler):
    """What a library has to say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def loaded_quietly(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer as transformers loads them, without a word."""
    overheard = Overheard()
    logger = logging.getLogger("transformers")
    logger.addHandler(overheard)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    finally:
        logger.removeHandler(overheard)
    assert overheard.lines == []
    assert not any(info.values()), info
    return model.eval(), tokenizer


def command(*words: str, out: Any = None) -> Any:
    """Runs a command; returns what it printed as JSON."""
    assert main([*words, "--json"]) == 0
    return json.loads(out.readouterr().out)


ALSO = {name for name in CASES if name not in ("llama tied", "qwen3-moe", "gpt-oss")}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n in ALSO else ()) for n in CASES],
)
def test_a_model_comes_back_bit_by_bit_and_both_write_the_same_64_tokens(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run, out = (str(tmp_path / part) for part in ("source", "run", "out"))
    theirs = write_model(name, Path(source))
    capsys.readouterr()
    made = command("import", source, "--run", run, out=capsys)
    loss = [note for note in made["notes"] if note.startswith("router_aux_loss_coef = ")]
    assert made["notes"] == loss and made["tokenizer"]
    assert len(loss) == (name in ("qwen3-moe", "gpt-oss")), "a loss that is not taken over is told"
    command("export", run, "--to", out, "--shard-bytes", "1e5", out=capsys)
    model, tokenizer = loaded_quietly(Path(out))
    before, after = theirs.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    greedy = ["--temperature", "0", "--max-new-tokens", str(NEW)]
    (text,) = command("generate", run, "--prompt", PROMPT, *greedy, out=capsys)["texts"]
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        do_sample=False,
        suppress_tokens=list(range(TOKENS, VOCABULARY)),  # rows that stand for no token
        pad_token_id=tokenizer.eos_token_id,
    )[0, prompt.shape[1] :].tolist()
    if tokenizer.eos_token_id in written:
        written = written[: written.index(tokenizer.eos_token_id)]
    assert text["tokens"] == written
    assert len(written) > 8


def test_a_model_with_an_extra_layer_is_loaded_without_a_word(tmp_path: Path) -> None:
    model = replace(CASES["deepseek v3"], predict_ahead=True)  # type: ignore[call-arg]
    sources = {n: Live(torch.randn(shape)) for n, shape in our_shapes(model).items()}
    write_model("deepseek v3", tmp_path / "out")
    for path in (tmp_path / "out").glob("model*"):
        path.unlink()
    write_export(plan_export(model, sources), tmp_path / "export")
    for path in (tmp_path / "export").iterdir():
        path.replace(tmp_path / "out" / path.name)
    theirs, _ = loaded_quietly(tmp_path / "out")
    assert torch.equal(theirs.state_dict()["lm_head.weight"], sources["head.weight"].tensor)


def test_the_tokenizer_and_its_chat_template_go_in_and_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model("llama", tmp_path / "source")
    command("import", str(tmp_path / "source"), "--run", str(tmp_path / "run"), out=capsys)
    assert (tmp_path / "run" / "tokenizer" / "chat_template.jinja").read_text() == TEMPLATE
    command("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), out=capsys)
    _, tokenizer = loaded_quietly(tmp_path / "out")
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "user: hello\n"


def test_formats_and_vocabulary_size_are_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = write_model("deepseek v3", tmp_path / "source")
    source, run, out = (str(tmp_path / part) for part in ("source", "run", "out"))
    leaves = ["--dtype", "bfloat16", "--model.vocab-size", "320"]
    made = command("import", source, "--run", run, *leaves, out=capsys)
    assert made["notes"] == ["18 rows of zeros were added to embedding and head"]
    wide = ["--dtype", "float32", "--vocab-size", str(VOCABULARY)]
    command("export", run, "--to", out, *wide, out=capsys)
    model, _ = loaded_quietly(Path(out))
    for name, tensor in theirs.state_dict().items():
        kept = name.endswith("e_score_correction_bias")
        expected = tensor if kept else tensor.bfloat16().float()
        assert torch.equal(model.state_dict()[name], expected), name


def test_nothing_is_left_where_an_import_or_export_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    write_model("llama", source)
    (source / "model.safetensors.index.json").unlink()
    assert main(["import", str(source), "--run", str(run)]) == 2
    assert not run.exists()
    assert main(["import", str(tmp_path / "nowhere"), "--run", str(run)]) == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert main(["export", str(run), "--to", str(tmp_path / "full")]) == 2
    told = capsys.readouterr().err
    assert "there is no model.safetensors" in told
    assert "does not exist" in told and "is there already" in told


def test_an_export_is_refused_in_words_where_there_is_no_room_or_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("llama", tmp_path / "source")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    command("import", str(tmp_path / "source"), "--run", run, out=capsys)
    for shard_bytes in ("inf", "nan", "0"):
        assert main(["export", run, "--to", out, "--shard-bytes", shard_bytes]) == 2
        assert f"--shard-bytes {float(shard_bytes)} is out of range" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "source")
    assert main(["export", run, "--to", str(tmp_path / "link")]) == 2

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "model-00001-of-00001.safetensors")

    monkeypatch.setattr(exporting, "write_shards", full)
    assert main(["export", run, "--to", out]) == 1
    assert f"cannot write {out}: No space left on device" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"source", "run", "link"}


def test_changed_rotary_positions_are_told_and_other_heads_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model("llama", tmp_path / "source")
    source, run = str(tmp_path / "source"), str(tmp_path / "run")
    made = command("import", source, "--run", run, "--model.rope-theta", "1e6", out=capsys)
    assert [note for note in made["notes"] if "rope_theta" in note and "1000000.0" in note]
    heads = ["--model.n-heads", "8", "--model.n-kv-heads", "4", "--model.head-dim", "4"]
    assert main(["import", source, "--run", str(tmp_path / "other"), *heads]) == 2
    assert "layers.0.attention.query: our result differs" in capsys.readouterr().err


def test_an_import_by_a_wrong_table_ends_by_name_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("deepseek v3", tmp_path / "source")
    family = FAMILIES["deepseek_v3"]

    def unpermuted(model: Any, config: Any) -> list[Rule]:
        return [
            Rule(r.ours, r.theirs) if isinstance(r.transform, Reorder) else r
            for r in family.rules(model, config)
        ]

    monkeypatch.setitem(FAMILIES, "deepseek_v3", replace(family, rules=unpermuted))
    assert main(["import", str(tmp_path / "source"), "--run", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "layers.0.attention.query: our result differs" in told
    assert "layers.0.attention.key_value: our result differs" in told
    assert not (tmp_path / "run").exists()


def test_a_run_on_bytes_is_exported_with_a_tokenizer_of_the_same_ids(
    tmp_path: Path,
) -> None:
    from armillary.checkpoint.hugging_face.tokenizer import export_tokenizer
    from armillary.data.tokenizer import save_tokenizer
    from armillary.data.tokenizer_bytes import ByteTokenizer

    save_tokenizer(ByteTokenizer(), tmp_path / "tokenizer")
    model = CASES["llama"]
    sources = {n: Live(torch.randn(shape)) for n, shape in our_shapes(model).items()}
    plan = plan_export(model, sources, tokenizer=tmp_path / "tokenizer")
    write_export(plan, tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("plain", "  two\n\tlines ", "ünïcode 星 🚀", "<|eosx|>"):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert plan.config["eos_token_id"] == 257
    assert not export_tokenizer(tmp_path / "none", tmp_path / "out", max_seq_len=1)


CHATML = """\
{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_turns(folder: Path, **config: Any) -> None:
    """A model whose tokenizer has special tokens for turns, and a template that uses them."""
    from armillary.data.tokenizer_subword import Bpe

    write_model("llama", folder)
    special = ("<|im_start|>", "<|im_end|>")
    built = Bpe(vocab_size=TOKENS, special=special).build(["def f(x): return x\n" * 20])
    (folder / "tokenizer.json").write_text(built.files()["tokenizer.json"])
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHATML} | config))


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}], ids=["silent", "against"])
def test_other_tools_begin_and_stop_as_generate_does(
    config: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from armillary.inference.load import load_trained

    with_turns(tmp_path / "source", **config)
    source, run, out = (str(tmp_path / name) for name in ("source", "run", "out"))
    command("import", source, "--run", run, out=capsys)
    for again in ("run", "again"):  # an export that is imported says the same once more
        trained = load_trained(tmp_path / again, device=torch.device("cpu"))
        command("export", str(tmp_path / again), "--to", f"{out}-{again}", out=capsys)
        model, theirs = loaded_quietly(Path(f"{out}-{again}"))
        expected = trained.encode("def ")
        assert expected[0] == trained.tokenizer.bos_id and expected.count(expected[0]) == 1
        assert theirs("def ").input_ids == expected
        turn = [{"role": "user", "content": "def "}]
        ids = theirs.apply_chat_template(turn, add_generation_prompt=True).input_ids
        assert ids.count(theirs.bos_token_id) == 1
        ends = [theirs.eos_token_id, theirs.convert_tokens_to_ids("<|im_end|>")]
        assert model.generation_config.eos_token_id == model.config.eos_token_id == ends
        if again == "run":
            command("import", f"{out}-run", "--run", str(tmp_path / "again"), out=capsys)


def test_a_run_of_conversations_leaves_bos_to_its_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_turns(tmp_path / "source")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    chat = ["--data.corpus", "chat", "--data.corpus.files", "none.jsonl"]
    command("import", str(tmp_path / "source"), "--run", run, *chat, out=capsys)
    command("export", run, "--to", out, out=capsys)
    _, theirs = loaded_quietly(Path(out))
    assert theirs.bos_token_id not in theirs("def ").input_ids


def test_rows_of_the_tokenizers_tokens_are_not_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_turns(tmp_path / "source")
    source, run, out = (str(tmp_path / name) for name in ("source", "run", "out"))
    assert main(["import", source, "--run", run, "--model.vocab-size", "260"]) == 2
    assert "--model.vocab-size 260: the tokenizer has" in capsys.readouterr().err
    assert not Path(run).exists()
    command("import", source, "--run", run, out=capsys)
    assert main(["export", run, "--to", out, "--vocab-size", "260"]) == 2
    assert "--vocab-size 260: the tokenizer has" in capsys.readouterr().err
    assert not Path(out).exists()
