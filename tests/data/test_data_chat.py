"""Corpora of conversations: their forms, their places on disk, and what is wrong with them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import pieces
from armillary.data.chat.bundled import TEMPLATES
from armillary.data.chat.conversation import BadConversation, parse_conversation
from armillary.data.chat.masks import lessons
from armillary.data.chat.template import ChatTemplate
from armillary.data.config import (
    Bpe,
    Bytes,
    Chat,
    Data,
    File,
    JsonLines,
    Mixture,
    Part,
    WholeDocuments,
)
from armillary.data.dataset import training_set
from armillary.data.splits import Split
from armillary.data.store import build
from armillary.data.token_store import TokenStore
from armillary.data.tokenizer import save_tokenizer
from armillary.foundation.errors import Problem, UserError
from chat_examples import FORGETFUL, PLAIN, SUBWORDS

LETTERS = Bpe(vocab_size=260, special=("<|im_start|>", "<|im_end|>"))
WORDS = Bpe(vocab_size=300, special=("<|im_start|>", "<|im_end|>"))


def conversation(index: int) -> dict[str, Any]:
    turns = [("user", f"what is {index}?"), ("assistant", f"it is {index}")] * (1 + index % 3)
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def data_of(tmp_path: Path, *files: Path, tokenizer: Any = WORDS, **values: Any) -> Data:
    corpus = Chat(files=tuple(map(str, files)), **({"template": "chatml"} | values))
    return Data(
        corpus=corpus,
        tokenizer=tokenizer,
        packing=WholeDocuments(),
        validation_fraction=0.3,
        cache=f"{tmp_path}/cache",
        bos=False,
        eos=False,
        workers=1,
    )


def texts(store: TokenStore) -> dict[str, str]:
    """What is learned of each document, by its id."""
    found = {}
    for split in (*store.train, *store.validation):
        for place, name in enumerate(split.ids):
            found[name] = learned(store, split, place)
    return found


def learned(store: TokenStore, split: Split, place: int) -> str:
    assert split.scored is not None
    scored = split.scored[split.document_offsets[place] : split.document_offsets[place + 1]]
    ids = split.document(place)[scored].tolist()
    return store.tokenizer.decode(ids, skip_special_tokens=False)


def problems_of(data: Data) -> str:
    with pytest.raises(UserError) as raised:
        build(data)
    return str(raised.value)


def test_answers_are_learned_wherever_the_conversations_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(pieces, "PIECE_BYTES", 500)
    records = [conversation(index) for index in range(60)]
    lines = write_lines(tmp_path / "a.jsonl", records[:20])
    zipped = write_lines(tmp_path / "b.jsonl.gz", records[20:40])
    table = tmp_path / "c.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records[40:]), table)
    store = build(replace(data_of(tmp_path, lines, zipped, table), workers=2))
    found = texts(store)
    answers = [f"it is {i}<|im_end|>" * (1 + i % 3) for i in range(60)]
    assert sorted(found.values()) == sorted(answers)
    assert found["c.parquet:0"] == answers[40]
    held_out = list(store.validation[0].documents_bytes())
    for place, text in enumerate(held_out):
        plain = learned(store, store.validation[0], place).replace("<|im_end|>", "")
        assert text.decode() == plain


def test_conversations_of_sharegpt_are_the_same_corpus(tmp_path: Path) -> None:
    records = [conversation(index) for index in range(30)]
    names = {"user": "human", "assistant": "gpt"}
    theirs = [
        {
            "conversations": [
                {"from": names[message["role"]], "value": message["content"]}
                for message in record["messages"]
            ]
        }
        for record in records
    ]
    ours = texts(build(data_of(tmp_path, write_lines(tmp_path / "a.jsonl", records))))
    found = texts(build(data_of(tmp_path, write_lines(tmp_path / "b.jsonl", theirs))))
    assert sorted(ours.values()) == sorted(found.values())


TOOLS = """\
{{- tools | tojson }}{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.tool_calls | tojson if m.tool_calls else m.content }}<|im_end|>
{% endfor %}"""


def test_tables_have_tools_and_either_name_of_the_messages(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.jinja").write_text(TOOLS)
    tools = [{"name": "weather", "city": "string"}, {"name": "time"}]
    calls = [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time"}]
    records: list[dict[str, Any]] = []
    for index, call in enumerate(calls * 10):
        said = [
            {"from": "human", "value": str(index)},
            {"from": "gpt", "value": None, "tool_calls": [call]},
        ]
        records.append({"conversations": said, "tools": tools if index % 2 else None})
    as_text = [{**each, "tools": each["tools"] and json.dumps(tools)} for each in records]
    files = [write_lines(tmp_path / "c.jsonl", records)]
    for name, rows in (("a", records), ("b", as_text)):
        files.append(tmp_path / f"{name}.parquet")  # which has every member in every row
        parquet.write_table(pyarrow.Table.from_pylist(rows), files[-1])
    options = {"template": f"{tmp_path}/t.jinja", "tokenizer": LETTERS}
    stores = [build(data_of(tmp_path, file, **options)) for file in files]
    answers = [sorted(texts(store).values()) for store in stores]
    tokens = [store.train[0].n_tokens + store.validation[0].n_tokens for store in stores]
    assert answers[0] == answers[1] == answers[2]
    assert tokens[0] == tokens[1] == tokens[2]
    assert '[{"name": "weather", "arguments": {"city": "Rome"}}]<|im_end|>' in answers[0][-1]
    parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "d.parquet")
    message = problems_of(data_of(tmp_path, tmp_path / "d.parquet"))
    assert "no column 'messages' or 'conversations'" in message
    assert "--data.corpus.field" in message


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_of_conversations_that_are_too_long_the_beginning_or_nothing_is_learned(
    tmp_path: Path, too_long: str
) -> None:
    turns = [("user", "count"), ("assistant", "one"), ("user", "go on"), ("assistant", "two " * 99)]
    long = {"messages": [{"role": role, "content": text} for role, text in turns]}
    file = write_lines(tmp_path / "a.jsonl", [long, *map(conversation, range(9))])
    data = replace(
        data_of(tmp_path, file, tokenizer=LETTERS),
        packing=WholeDocuments(too_long=too_long),
        validation_fraction=0,
    )
    store = build(data)
    dataset = training_set(store, data, seq_len=256, seed=0)
    (split,) = store.train
    place = int(np.argmax(np.diff(split.document_offsets)))
    first = split.document(place).tolist()
    batch = dataset.batch(0, dataset.samples_per_epoch)
    labels = batch.labels[batch.labels >= 0].tolist()
    scored = split.scored[split.document_offsets[place] : split.document_offsets[place + 1]]
    others = int(split.scored[0 : split.n_tokens].sum()) - int(scored.sum())
    rows = [row for row in batch.tokens.tolist() if row == first[:256]]
    if too_long == "cut":
        assert len(rows) == 1
        assert len(labels) == others + int(scored[:257].sum())
        assert "1 of 10 documents are longer than budget.seq_len = 256" in dataset.remarks[0]
    else:
        assert rows == []
        assert len(labels) == others
        assert "they are not trained on" in dataset.remarks[0]
        with pytest.raises(UserError, match="too-long cut"):
            training_set(store, data, seq_len=8, seed=0)


def test_a_mixture_of_conversations_and_texts_is_masked_in_the_conversations_only(
    tmp_path: Path,
) -> None:
    chats = write_lines(tmp_path / "a.jsonl", [conversation(index) for index in range(40)])
    plain = write_lines(tmp_path / "b.jsonl", [{"text": f"plain text {i}"} for i in range(40)])
    chat = data_of(tmp_path, chats, tokenizer=LETTERS)
    parts = (
        Part(corpus=chat.corpus, weight=3),
        Part(corpus=JsonLines(files=(str(plain),))),
    )
    data = replace(chat, corpus=Mixture(parts=parts), eos=True)
    store = build(data)
    assert store.train[1].scored is None
    assert store.train[0].document(0)[-1] != store.tokenizer.eos_id  # the template decides
    assert store.train[1].document(0)[-1] == store.tokenizer.eos_id
    dataset = training_set(store, data, seq_len=64, seed=0)
    batch = dataset.batch(0, 40)
    corpora = [sample_id >> 40 for sample_id in batch.sample_ids]
    assert corpora.count(0) == 30
    for labels, tokens, corpus in zip(batch.labels, batch.tokens, corpora, strict=True):
        counted = store.tokenizer.decode(labels[labels >= 0].tolist())
        assert ("user" in counted, "it is" in counted) == (False, corpus == 0)
        assert corpus == 0 or counted.startswith("lain text"), tokens
    both = [dataset.batch(0, 40, rows).labels for rows in (range(0, 40, 2), range(1, 40, 2))]
    assert all((part == batch.labels[i::2]).all() for i, part in enumerate(both))


def test_the_tokenizers_own_template_is_used_and_kept_with_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    save_tokenizer(SUBWORDS, folder)
    file = write_lines(tmp_path / "a.jsonl", [conversation(i) for i in range(20)])
    tokenizer = File(path=str(folder))
    data = data_of(tmp_path, file, tokenizer=tokenizer, template="")
    assert "no chat template" in problems_of(data)
    template = (
        "{% for m in messages %}{% generation %}{{ m.role }}</s>{% endgeneration %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    first = build(data)
    assert {text[-13:] for text in texts(first).values()} == {"assistant</s>"}
    assert first.tokenizer.chat_template == template
    (folder / "chat_template.jinja").write_text(template.replace("m.role", "m.role[0]"))
    second = build(data)
    assert second.fingerprint != first.fingerprint
    assert second.tokenizer.chat_template != template
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint  # it decides no ids


def test_turns_apart_are_held_out_together(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(FORGETFUL)
    file = write_lines(tmp_path / "a.jsonl", [conversation(3 * n + 2) for n in range(40)])
    options = {"template": f"{tmp_path}/t.jinja", "tokenizer": WORDS}
    assert "turns-apart" in problems_of(data_of(tmp_path, file, **options))
    store = build(data_of(tmp_path, file, turns_apart=True, **options))
    train, held_out = (
        {name.partition("#")[0] for name in splits[0].ids}
        for splits in (store.train, store.validation)
    )
    assert len(texts(store)) == 120
    assert len(train) + len(held_out) == 40 and held_out


def test_what_is_learned_is_part_of_the_stores_key_and_old_stores_are_found(
    tmp_path: Path,
) -> None:
    file = write_lines(tmp_path / "a.jsonl", [conversation(i) for i in range(30)])
    stores = [
        build(data_of(tmp_path, file, train_on=train_on))
        for train_on in ("assistant", "last", "all", "assistant")
    ]
    assert len({store.fingerprint for store in stores}) == 3
    assert stores[0].folder == stores[3].folder
    counts = [int(store.train[0].scored[0 : store.train[0].n_tokens].sum()) for store in stores]
    assert (
        counts[1]
        < counts[0]
        < counts[2]
        == stores[2].train[0].n_tokens - len(stores[2].train[0].ids)
    )


def test_conversations_without_anything_to_learn_are_left_out_and_counted(tmp_path: Path) -> None:
    silent = [{"messages": []}, {"messages": [{"role": "user", "content": "hello?"}]}]
    unweighted = conversation(0)
    unweighted["messages"][1]["weight"] = 0
    records = [*silent, unweighted, *map(conversation, range(20))]
    store = build(data_of(tmp_path, write_lines(tmp_path / "a.jsonl", records)))
    assert store.manifest["parts"][0]["empty_documents"] == 3
    assert len(texts(store)) == 20


def test_rows_hold_whole_conversations_and_nothing_of_one_is_seen_from_another(
    tmp_path: Path,
) -> None:
    data = data_of(tmp_path, write_lines(tmp_path / "a.jsonl", [*map(conversation, range(60))]))
    store = build(data)
    dataset = training_set(store, data, seq_len=64, seed=0)
    start = store.tokenizer.special_tokens["<|im_start|>"]
    batch = dataset.batch(0, dataset.samples_per_epoch)
    for tokens, lengths in zip(batch.tokens.tolist(), batch.documents.lengths, strict=True):
        begin = 0
        for length in lengths:
            assert tokens[begin] in (start, 0)  # a conversation's beginning, or padding
            begin += length
        assert begin == 64


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "a.jsonl:21: has no field 'messages'"),
        ({"messages": "x"}, "is no list of messages"),
        ({"messages": [7]}, "message 0 is no object"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": 7}]}, "something other than text"),
        ({"messages": [{"role": "user", "content": "x", "weight": 0.5}]}, "has weight 0.5"),
        ({"conversations": [{"from": "dog", "value": "x"}]}, "is from 'dog'"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "holds U+FDD0"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"messages": [{"role": "user"}, {"role": "assistant"}]}, "cannot be rendered"),
        ({**conversation(1), "tools": "{"}, "its tools are not JSON"),
        ({**conversation(1), "tools": [{"name": "f"}]}, "chatml has no place for tools"),
    ],
    ids=str,
)
def test_a_record_that_is_no_conversation_is_told_with_its_line(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    records = [*map(conversation, range(20)), record]
    found = problems_of(data_of(tmp_path, write_lines(tmp_path / "a.jsonl", records)))
    assert message in found and "a.jsonl:21" in found


def test_values_that_mean_nothing_are_told_before_anything_is_read(tmp_path: Path) -> None:
    def told(**values: Any) -> list[Problem]:
        return Chat(files=("a.jsonl",), **values).problems()

    assert told() == []
    assert "train_on" in told(train_on="user")[0].message
    assert "today" in told(today="yesterday")[0].message
    assert "arguments" in told(arguments=("thinking",))[0].message
    file = write_lines(tmp_path / "a.jsonl", [conversation(0)])
    assert "cannot be read" in problems_of(data_of(tmp_path, file, template="no-such-file"))
    assert "no chat template" in problems_of(
        data_of(tmp_path, file, template="", tokenizer=Bytes())
    )


_NAMES = [
    "messages",
    "conversations",
    "role",
    "content",
    "from",
    "value",
    "weight",
    "text",
    "tools",
]
_WORDS = st.sampled_from(
    ["user", "assistant", "human", "gpt", "x", "\udc80", "\ufdd1", "<|im_end|>"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_NAMES), inner),
    max_leaves=20,
)


@given(
    record=st.dictionaries(st.sampled_from(_NAMES), _VALUES),
    policy=st.sampled_from(["error", "replace", "skip"]),
    template=st.sampled_from([PLAIN, FORGETFUL, TEMPLATES["chatml"], TEMPLATES["llama3"]]),
)
@settings(max_examples=120, deadline=None)
def test_any_record_is_a_conversation_or_a_problem(
    record: dict[str, Any], policy: str, template: str
) -> None:
    render = ChatTemplate.of(SUBWORDS, template).render
    try:
        found = parse_conversation(record, "", policy)
        if found is not None:
            for lesson in lessons(
                found,
                lambda said, prompt: render(said.messages, tools=said.tools, prompt=prompt),
                train_on="assistant",
                turns_apart=False,
            ):
                lesson.text.encode("utf-8")
    except BadConversation as error:
        assert str(error.problem("a.jsonl:1").message)
