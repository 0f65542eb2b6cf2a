"""Conversations as prompts: what a template makes of them, and where an answer ends."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.store import CheckpointStore
from armillary.cli.main import main
from armillary.data.config import Chat
from armillary.data.tokenizer import Tokenizer, save_tokenizer
from armillary.data.tokenizer_bytes import Bytes, ByteTokenizer
from armillary.foundation.errors import UserError
from armillary.inference.chat import chat_prompt, turn_ends
from armillary.inference.generate import generate
from armillary.inference.load import load_trained
from armillary.models import Llama
from armillary.recipe import Recipe, to_toml
from chat_examples import EXAMPLES, SUBWORDS
from model_cases import build

MODEL = Llama(
    vocab_size=260, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=256
)
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}[{{ name or "assistant" }}]{% endif %}"""
BOS, EOS = ByteTokenizer().bos_id, ByteTokenizer().eos_id


def with_template(text: str, tokenizer: Tokenizer = SUBWORDS) -> Tokenizer:
    found = copy.copy(tokenizer)
    found.chat_template = text
    return found


BEGINNINGS = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n</s> hello<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "llama3": (
        "<|bos|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n</s> hello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "instructions": "<|bos|>Be kind.\n\n[INST] </s> hello [/INST]",
}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "instructions": "</s>"}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_prompt_is_the_conversation_up_to_the_models_turn_which_ends_as_in_training(
    name: str,
) -> None:
    tokenizer = with_template(EXAMPLES[name].text)
    record = {"messages": [{"role": "user", "content": "</s> hello"}]}
    ids = chat_prompt(tokenizer, Recipe(), record, system="Be kind.", where="here")
    assert tokenizer.decode(ids, skip_special_tokens=False) == BEGINNINGS[name]
    assert tokenizer.special_tokens["</s>"] not in ids  # somebody wrote it
    assert turn_ends(tokenizer) == {tokenizer.eos_id, tokenizer.special_tokens[ENDS[name]]}


def test_letters_in_the_name_of_the_token_that_ends_a_turn_are_no_answer() -> None:
    text = "{% for m in messages %}{{ m.content }}<|begin_of_text|>{% endfor %}"
    found = turn_ends(with_template(text))
    assert SUBWORDS.special_tokens["<|begin_of_text|>"] in found
    assert turn_ends(with_template("{{ raise_exception('no') }}")) == {SUBWORDS.eos_id}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("chat") / "run"
    run.mkdir()
    recipe = Recipe(model=MODEL)
    corpus = Chat(files=("gone.jsonl",), arguments=('name="model"',))
    data = replace(recipe.data, tokenizer=Bytes(), corpus=corpus)
    (run / "recipe.toml").write_text(to_toml(replace(recipe, data=data)))
    save_tokenizer(with_template(TEMPLATE, ByteTokenizer()), run / "tokenizer")
    with CheckpointStore(run / "checkpoints", Checkpoint(asynchronous=False)) as store:
        store.save(2, gather_state(build(MODEL)), {"step": 2})
    return run


def test_the_command_answers_turns_and_conversations_by_the_runs_template_and_its_arguments(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said += [{"role": "user", "content": "c"}]
    file = tmp_path / "said.jsonl"
    file.write_text(json.dumps({"messages": said}) + "\n" + json.dumps({"prompt": "d"}) + "\n")
    prompts = [
        [BOS, *b"[user]a", EOS, *b"[assistant]b", EOS, *b"[user]c", EOS, *b"[model]"],
        [BOS, *b"[user]d", EOS, *b"[model]"],
    ]
    trained = load_trained(run, device=torch.device("cpu"))
    options = {"max_new_tokens": 8, "seed": 3, "vocab_size": 258}
    expected = generate(trained.model, prompts, temperature=0.8, eos_id=EOS, **options)
    words = ["generate", str(run), "--chat", "--max-new-tokens", "8", "--seed", "3"]
    assert main([*words, "--prompts-file", str(file), "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert [text["tokens"] for text in texts] == expected
    answers = [text["text"] for text in texts]
    assert main([*words, "--prompts-file", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown == f"--- 1 of 2\nc\n{answers[0]}\n--- 2 of 2\nd\n{answers[1]}\n"
    assert main([*words, "--prompt", "d"]) == 0
    assert capsys.readouterr().out == f"d\n{answers[1]}\n"


@pytest.mark.parametrize(
    "case",
    [
        ({"messages": [{"role": "user", "content": "a"}]}, [], "--chat is not given"),
        ({"messages": []}, ["--chat"], "said.jsonl:1: a conversation without a message"),
        ({"messages": 3}, ["--chat"], "said.jsonl:1: field 'messages' is no list"),
        ({"messages": [{"content": "a"}]}, ["--chat"], "said.jsonl:1: message 0 has no role"),
        (
            {"messages": [{"role": "user", "content": "\ud800"}, {"role": "user", "content": "a"}]},
            ["--chat"],
            "half of a surrogate pair",
        ),
        ({"prompt": "\ufdd0\U000f0000"}, ["--chat"], "said.jsonl:1: holds U+FDD0"),
        ({"prompt": "a"}, ["--chat", "--system", "\udcff"], "--system: a text: character 0"),
        (
            {"messages": [{"role": "system", "content": "a"}]},
            ["--chat", "--system", "b"],
            "said.jsonl:1: the conversation has a system turn of its own",
        ),
        ({"prompt": "a"}, ["--system", "b"], "--system without --chat"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_in_words(
    case: tuple[object, list[str], str],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, options, message = case
    file = tmp_path / "said.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert main(["generate", str(run), "--prompts-file", str(file), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_template_says_so() -> None:
    with pytest.raises(UserError, match="tokenizer has no chat template"):
        chat_prompt(ByteTokenizer(), Recipe(), {}, system="", where="here")
