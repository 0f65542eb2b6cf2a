"""Tasks: what they ask of a file, what they make of answers, what they refuse of a file."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.config import JsonLines
from armillary.data.tokenizer_bytes import ByteTokenizer
from armillary.evaluation.bits_per_byte import BitsPerByte
from armillary.evaluation.cloze import Cloze
from armillary.evaluation.config import Evaluation
from armillary.evaluation.files import MOST_ITEM_BYTES
from armillary.evaluation.items import Encoder, Likelihood, Request
from armillary.evaluation.multiple_choice import MultipleChoice
from armillary.foundation.errors import UserError

TOKENIZER = ByteTokenizer()
ENCODER = Encoder(TOKENIZER, bos=True, eos=True)
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id


def lines(folder: Path, *records: object, name: str = "items.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def test_a_question_asks_for_each_choice_after_prefix_question_and_delimiter(
    tmp_path: Path,
) -> None:
    (tmp_path / "prefix.txt").write_text("1+1= 2\n")
    file = lines(tmp_path, {"question": "2+2=", "choices": ["4", "22"], "answer": "A"})
    task = MultipleChoice(files=(file,), prefix=str(tmp_path / "prefix.txt"))
    context = (BOS, *ids("1+1= 2\n2+2="))
    prepared = task.prepare(ENCODER)
    assert prepared.requests == (Request(context, ids(" 4")), Request(context, ids(" 22")))
    assert [question.answer for question in prepared.questions] == [0]


def test_accuracy_compares_by_probability_by_byte_and_by_token(tmp_path: Path) -> None:
    file = lines(
        tmp_path,
        {"context": "a", "choices": ["xx", "yyyy"], "answer": 1},
        {"context": "b", "choices": ["é", "z"], "answer": "é"},
    )
    prepared = MultipleChoice(files=(file,), delimiter="").prepare(ENCODER)
    answers = [
        Likelihood(3.0, False, 2), Likelihood(4.0, False, 4),  # 1.5 and 1 a byte: only then right
        Likelihood(1.0, False, 1), Likelihood(0.9, False, 1),  # of two bytes: right by byte only
    ]  # fmt: skip
    measured = prepared.measure(answers)
    found = {metric.name: metric.value for metric in measured.metrics}
    assert found == {
        "accuracy": 0.0, "accuracy_per_byte": 1.0, "accuracy_per_token": 0.5, "nats": 2.5,
    }  # fmt: skip
    assert (measured.items, measured.score) == (2, 1.0)
    spread = {metric.name: metric.error for metric in measured.metrics}
    assert spread["accuracy_per_token"] == 0.5  # sqrt(p (1 - p) / (n - 1))
    assert spread["nats"] == 1.5  # of 4 and 1: sqrt(4.5 / 2)


def test_what_a_diverged_model_says_is_never_right(tmp_path: Path) -> None:
    file = lines(tmp_path, {"question": "a", "choices": ["x", "y"], "answer": 0})
    prepared = MultipleChoice(files=(file,)).prepare(ENCODER)
    measured = prepared.measure([Likelihood(math.nan, False, 1), Likelihood(1.0, False, 1)])
    assert measured.metrics[0].value == 0
    assert math.isnan(measured.metrics[-1].value)


def test_a_cloze_scores_its_target_or_the_last_word_with_the_space_before_it(
    tmp_path: Path,
) -> None:
    file = lines(
        tmp_path,
        {"context": "one two", "target": "three"},
        {"context": "one two ", "target": "three"},
        {"text": "one two three\n"},
    )
    prepared = Cloze(files=(file,)).prepare(ENCODER)
    assert set(prepared.requests) == {Request((BOS, *ids("one two")), ids(" three"))}
    answers = [Likelihood(2.0, True, 6), Likelihood(4.0, False, 6), Likelihood(3.0, True, 6)]
    measured = prepared.measure(answers)
    values = {metric.name: metric.value for metric in measured.metrics}
    assert values == {"accuracy": 2 / 3, "nats": 3.0}
    assert measured.score == 3.0
    unscored = [Likelihood(0.0, True, 0), *answers[1:]]  # all of its target in an unseen token
    assert prepared.measure(unscored).metrics[0].value == 1 / 3


@pytest.mark.parametrize(
    ("bos", "size"), [(True, 5), (False, 4)], ids=["with BOS", "the first byte is not scored"]
)
def test_bits_per_byte_are_of_the_text_that_is_scored(tmp_path: Path, bos: bool, size: int) -> None:
    file = lines(tmp_path, {"text": "déjà"[:4]}, {"text": ""}, {"text": "more"})
    text = "déjà"
    task = BitsPerByte(corpus=JsonLines(files=(file,)), limit=1)
    prepared = task.prepare(Encoder(TOKENIZER, bos=bos, eos=True))
    begin = (BOS,) if bos else ()
    assert prepared.requests == (Request(begin, (*ids(text), EOS)),)
    assert prepared.size == len(text.encode()) - (not bos) == size + 1
    measured = prepared.measure([Likelihood(12.0, False, 6)])
    assert measured.metrics[0].value == pytest.approx(12 / math.log(2) / prepared.size)
    assert measured.metrics[1].value == 2.0


def test_a_token_across_the_border_is_the_continuations() -> None:
    class Merging(ByteTokenizer):
        """Has a token for `ab`, as a subword tokenizer may."""

        def encode_batch(self, texts):  # type: ignore[no-untyped-def]
            import numpy as np

            whole = [list(text.replace("ab", "\x00").encode()) for text in texts]
            return [np.array(each, np.uint32) for each in whole]

    encoder = Encoder(Merging(), bos=False, eos=False)
    (request,) = encoder.pairs([("xa", "by")])
    assert request == Request((ord("x"),), (0, ord("y")))


def test_a_document_of_tokens_gets_bos_and_eos_where_it_lacks_them() -> None:
    for given_ids in ([5, 6], [BOS, 5, 6], [5, 6, EOS], [BOS, 5, 6, EOS]):
        assert ENCODER.tokens(given_ids) == Request((BOS,), (5, 6, EOS))
    assert Encoder(TOKENIZER, bos=False, eos=False).tokens([5, 6]) == Request((), (5, 6))


def test_the_bundled_tasks_are_whole_and_of_several_letters() -> None:
    choices = MultipleChoice().prepare(ENCODER)
    assert len(choices.questions) == 16
    assert len({question.answer for question in choices.questions}) > 2
    assert len(Cloze().prepare(ENCODER).requests) == 12
    assert len(BitsPerByte().prepare(ENCODER).requests) == 6


BAD = {
    "no JSON": (b"{", "items.jsonl:1: not JSON"),
    "no object": (b"[1]", "items.jsonl:1: list"),
    "nothing": (b"\n\n", "no items"),
    "not UTF-8": (b'{"question": "\xff"}', "not JSON"),
    "no question": (b'{"choices": ["a", "b"], "answer": 0}', "no 'question' or 'context'"),
    "no text": (b'{"question": 3, "choices": ["a", "b"], "answer": 0}', "'question' is not text"),
    "half a character": (
        b'{"question": "\\ud800", "choices": ["a", "b"], "answer": 0}', "is not text",
    ),
    "one choice": (b'{"question": "q", "choices": ["a"], "answer": 0}', "no list of 2"),
    "an empty choice": (b'{"question": "q", "choices": ["a", ""], "answer": 0}', "empty choice"),
    "an answer beyond": (b'{"question": "q", "choices": ["a", "b"], "answer": 2}', "0 to 1"),
    "true": (b'{"question": "q", "choices": ["a", "b"], "answer": true}', "'answer' is 'True'"),
    "two alike": (b'{"question": "q", "choices": ["x", "x"], "answer": "x"}', "'answer' is 'x'"),
    "too long": (b'"' + b"x" * MOST_ITEM_BYTES + b'"', "a line too long"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_file_and_line(case: str, tmp_path: Path) -> None:
    content, message = BAD[case]
    (tmp_path / "items.jsonl").write_bytes(content)
    with pytest.raises(UserError) as caught:
        MultipleChoice(files=(str(tmp_path / "items.jsonl"),)).prepare(ENCODER)
    assert message in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mutated_files_are_read_or_refused_in_words(data: st.DataObject) -> None:
    good = bytearray(b'{"question": "q", "choices": ["a", "b"], "answer": 0, "text": "a b"}\n')
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "items.jsonl")
        path.write_bytes(bytes(good))
        for task in (MultipleChoice(files=(str(path),)), Cloze(files=(str(path),))):
            try:
                assert task.prepare(ENCODER).requests
            except UserError as error:
                assert str(path) in str(error)


def test_all_problems_of_an_evaluation_are_told_at_once() -> None:
    wrong = Evaluation(
        every=-1,
        tokens_at_once=0,
        tasks=(
            MultipleChoice(name="a/b", files=()),
            Cloze(limit=-1),
            Cloze(files=("nowhere.jsonl", "bundled:nothing")),
        ),
    )
    text = "\n".join(problem.message for problem in wrong.problems(32, 64))
    for part in (
        "evaluation.every = -1", "evaluation.tokens_at_once = 0", "tasks.0.name = 'a/b'",
        "evaluation.tasks.0.files is empty", "evaluation.tasks.1.limit = -1",
        "tasks.2.name = 'cloze' is another task's name",
    ):  # fmt: skip
        assert part in text
    missing = [problem.message for problem in wrong.missing()]
    assert missing == [
        f"evaluation.tasks.2.files: nowhere.jsonl is not a file (looked for from {Path.cwd()})",
        "there is no bundled:nothing",
    ]
    assert "beyond model.max_seq_len = 64" in Evaluation(seq_len=65).problems(32, 64)[0].message
    assert "windows are 32" in Evaluation(stride=33).problems(32, 64)[0].message
    assert "no evaluation.tasks" in Evaluation(every=1).problems(32, 64)[0].message
