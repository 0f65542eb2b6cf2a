"""What is learned of a conversation: exactly the model's turns, for any turns and any content."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.chat.conversation import BadConversation, parse_conversation
from armillary.data.chat.masks import lessons
from armillary.data.chat.template import ChatTemplate
from armillary.data.corpus import Document
from armillary.data.encoding import Encoded, Encoding, encode_documents
from armillary.data.tokenizer import Tokenizer
from chat_examples import (
    BYTES,
    EXAMPLES,
    FORGETFUL,
    PLAIN,
    SUBWORDS,
    Piece,
    conversations,
)

HOW = Encoding("", bos=True, eos=True, held_out_below=0, dtype="uint32", masks=True)


def learned_from(
    text: str,
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer = SUBWORDS,
    *,
    train_on: str = "assistant",
    turns_apart: bool = False,
) -> list[Encoded]:
    template = ChatTemplate.of(tokenizer, text)
    conversation = parse_conversation({"messages": messages}, "", "error")
    assert conversation is not None
    found = lessons(
        conversation,
        lambda said, prompt: template.render(said.messages, prompt=prompt),
        train_on=train_on,
        turns_apart=turns_apart,
    )
    documents = [Document("", lesson.text, marks=lesson.marks) for lesson in found]
    return encode_documents(documents, tokenizer, HOW)


def by_hand(pieces: list[Piece], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids and masks of pieces, by counting bytes along the tokens of the text between specials."""
    specials = tokenizer.special_tokens
    ids: list[int] = []
    scored: list[bool] = []
    stretches: Iterator[tuple[bool, Iterator[Piece]]] = itertools.groupby(
        pieces, key=lambda piece: piece[2] and piece[0] in specials
    )
    for special, stretch in stretches:
        group = list(stretch)
        if special:
            ids += [specials[name] for name, _, _ in group]
            scored += [written for _, written, _ in group]
            continue
        wanted = [written for part, written, _ in group for _ in part.encode()]
        whole = "".join(part for part, _, _ in group).encode()
        position = 0
        for token in tokenizer.encode(whole.decode()):
            size = tokenizer.byte_count(token)
            hit = any(wanted[position : position + size])
            ids.append(token)
            scored.append(hit)
            position += size
        assert position == len(whole)
    return ids, scored


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        *((name, SUBWORDS) for name in ("chatml", "llama3", "plain", "instructions")),
        *((name, BYTES) for name in ("chatml", "llama3", "plain-without-tokens")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@given(messages=conversations(), train_on=st.sampled_from(["assistant", "last"]))
@settings(max_examples=60, deadline=None)
def test_what_is_learned_is_what_was_marked_by_hand(
    name: str, tokenizer: Tokenizer, messages: list[dict[str, Any]], train_on: str
) -> None:
    example = EXAMPLES[name]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = turns[-1:] if train_on == "last" else turns
    learned = {i for i in turns if messages[i].get("weight", 1)}
    found = learned_from(example.text, messages, tokenizer, train_on=train_on)
    if not learned:
        assert found == []
        return
    [encoded] = found
    assert encoded.scored is not None
    ids, scored = by_hand(example.pieces(messages, learned), tokenizer)
    assert encoded.tokens.tolist() == ids
    assert encoded.scored.tolist() == [False, *scored[1:]]  # nothing comes before the first token
    counted = [token for token, hit in zip(ids, encoded.scored, strict=True) if hit]
    assert len(encoded.text) == sum(map(tokenizer.byte_count, counted))


TWO_TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "uno"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "dos"},
]


def learned_text(encoded: Encoded) -> str:
    return SUBWORDS.decode(encoded.tokens[encoded.scored].tolist(), skip_special_tokens=False)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_two_ways_out() -> None:
    with pytest.raises(BadConversation, match="not written by the template turn after turn") as why:
        learned_from(FORGETFUL, TWO_TURNS)
    assert "turns-apart" in str(why.value.fix) and "train-on last" in str(why.value.fix)
    [last] = learned_from(FORGETFUL, TWO_TURNS, train_on="last")
    assert learned_text(last) == "<think>\n\n</think>\n\ndos<|im_end|>"


def test_turns_apart_are_what_the_model_reads_and_writes_when_it_is_asked() -> None:
    first, second = learned_from(FORGETFUL, TWO_TURNS, turns_apart=True)
    assert [learned_text(each) for each in (first, second)] == [
        "<think>\n\n</think>\n\nuno<|im_end|>",
        "<think>\n\n</think>\n\ndos<|im_end|>",
    ]
    template = ChatTemplate.of(SUBWORDS, FORGETFUL)
    for encoded, count in ((first, 1), (second, 3)):
        prompt = template.render(TWO_TURNS[:count], prompt=True)
        ids = SUBWORDS.encode_marked(prompt.text, prompt.special).ids.tolist()
        assert encoded.scored is not None
        assert encoded.tokens[: int(encoded.scored.argmax())].tolist() == ids


def test_all_of_a_text_is_learned_but_its_first_token() -> None:
    [encoded] = learned_from(PLAIN, TWO_TURNS, train_on="all")
    assert encoded.scored is not None
    assert not encoded.scored[0] and encoded.scored[1:].all()


def test_blocks_that_are_not_one_for_each_turn_cannot_be_told_apart() -> None:
    twice = "{% for m in messages %}{% generation %}a{% endgeneration %}{% endfor %}"
    with pytest.raises(BadConversation, match="has 2 assistant turns, but 4 generation blocks"):
        learned_from(twice, TWO_TURNS, train_on="last")
    assert len(learned_from(twice, TWO_TURNS)) == 1


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_ids_and_masks_are_those_of_transformers_where_content_is_harmless(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Parsed

    parsed = Parsed.from_str(SUBWORDS.files()["tokenizer.json"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=parsed, bos_token="<|bos|>")
    contents = ["hello 🙂 there\n\nà tous", "  Bonjour  ", "", "x\n", "assistant"]
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents * 2)
    ]
    found = theirs.apply_chat_template(
        messages,
        chat_template=EXAMPLES[name].text,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    [encoded] = learned_from(EXAMPLES[name].text, messages)
    assert encoded.scored is not None
    assert encoded.tokens.tolist() == found["input_ids"]
    assert encoded.scored.astype(int).tolist() == found["assistant_masks"]
