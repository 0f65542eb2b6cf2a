"""`armillary data inspect --step`: what a step sees, compared with the batch that training gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armillary.cli.data_inspect import UNSCORED, inspect_sample, inspect_step, step_lines
from armillary.cli.main import main
from armillary.data.config import BestFit, Bytes, Concatenate, Data, JsonLines, Mixture, Part, Text
from armillary.data.corpus import CorpusConfig, Document, Source
from armillary.data.dataset import training_set
from armillary.data.store import build
from armillary.foundation import component as registry
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.progress import NoProgress
from armillary.recipe.budget import Budget
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Stage
from data_examples import write_texts

SEQUENCES = 6
"""Of a step of these recipes."""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A mixture of two corpora, three samples of one for each of the other."""
    write_texts(tmp_path / "texts", 40)
    lines = [json.dumps({"text": f"line {line} " + "né " * line}) for line in range(60)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    parts = (
        Part(corpus=Text(files=(f"{tmp_path}/texts/**/*.txt",)), weight=3.0),
        Part(corpus=JsonLines(files=(f"{tmp_path}/lines.jsonl",))),
    )
    data = Data(
        corpus=Mixture(parts=parts),
        tokenizer=Bytes(),
        cache=str(tmp_path / "cache"),
        validation_fraction=0,
        workers=1,
    )
    return Recipe(data=data, budget=Budget(steps=8, batch_tokens=SEQUENCES * 128, seq_len=128))


def looked_at(recipe: Recipe, step: int, rows: int = SEQUENCES) -> dict[str, Any]:
    """What `data inspect --step` finds."""
    return inspect_step(recipe, step, rows, NoProgress())


def test_a_step_has_the_samples_that_training_reads_with_their_shares(recipe: Recipe) -> None:
    store = build(recipe.data)
    dataset = training_set(store, recipe.data, seq_len=128, seed=recipe.seed)
    for step in (1, 2, 8):
        found = looked_at(recipe, step)
        first = (step - 1) * SEQUENCES
        batch = dataset.batch(first, first + SEQUENCES)
        assert found["positions"] == [first, first + SEQUENCES]
        assert found["sample_ids"] == list(batch.sample_ids)
        assert found["counted"] == int((batch.labels >= 0).sum())
        assert (found["padding"], found["padding_share"], found["stage"]) == (0, 0, None)
        of_text = sum(sample_id < 1 << 40 for sample_id in batch.sample_ids)
        text, lines = found["shares"]
        assert (text["corpus"], text["samples"], text["of_recipe"]) == ("text", of_text, 0.75)
        assert (lines["corpus"], lines["samples"]) == ("jsonl", SEQUENCES - of_text)
        assert lines["of_step"] == lines["samples"] / SEQUENCES
        for row, tokens in zip(found["rows"], batch.tokens.tolist(), strict=True):
            text = "".join(document["text"] for document in row["documents"])
            assert text.count("<|bos|>") == tokens.count(256)
            assert row["part"] == row["sample_id"] >> 40
            assert row == inspect_sample(recipe, row["position"], NoProgress())


@pytest.mark.parametrize("packing", [Concatenate(), BestFit()], ids=["concatenate", "best-fit"])
def test_what_counts_and_what_is_only_read_adds_up_to_the_labels(
    recipe: Recipe, packing: Concatenate | BestFit
) -> None:
    packed = replace(recipe, data=replace(recipe.data, packing=packing))
    found = looked_at(packed, 3)
    assert found["padding"] == SEQUENCES * 128 - found["inputs"]
    assert (found["padding"] > 0) == (packing == BestFit())
    for row in found["rows"]:
        assert sum(document["inputs"] for document in row["documents"]) == row["inputs"]
        for document in row["documents"]:
            first, *others = document["stretches"]
            assert not first["counted"], "nothing comes before a document's first token"
            assert [each["counted"] for each in others] in ([], [True])
            assert document["text"].startswith(first["text"].strip("\ufffd"))  # parts of an é
        assert sum(document["counted"] for document in row["documents"]) == row["counted"]
    whole = [one for row in found["rows"] for one in row["documents"] if one["first_token"] == 0]
    ends = [
        one for one in whole if packing == BestFit() and one["document_tokens"] == one["inputs"] + 1
    ]
    for document in ends:
        assert document["stretches"][0]["text"] == "<|bos|>"
        assert document["stretches"][-1]["text"].endswith("<|eos|>")
    assert ends or packing == Concatenate()


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked(CorpusConfig):
    """Documents of which only the middle is learned."""

    documents: int = 12
    """How many."""

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        return [Source(name="masked")]

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        for number in range(self.documents):
            tokens = np.frombuffer(b"asked: " + b"answer. " * (number + 1) + b"end", np.uint8)
            scored = np.isin(np.arange(len(tokens)), range(7, len(tokens) - 3))
            yield Document(f"{source.name}:{number}", "", tokens, scored)

    def masks(self) -> bool:
        """See `CorpusConfig.masks`."""
        return True


def test_what_a_mask_leaves_out_is_marked(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._NAMES, Masked, "masked")  # no choice of other tests
    data = replace(recipe.data, corpus=Masked(), packing=BestFit())
    found = looked_at(replace(recipe, data=data), 1)
    documents = [one for row in found["rows"] for one in row["documents"]]
    assert documents
    for document in documents:
        asked, answer, end = document["stretches"]
        assert asked == {"counted": False, "text": "asked: "}
        assert answer == {"counted": True, "text": "answer. " * (document["counted"] // 8)}
        assert end == {"counted": False, "text": "en"}, "the last token is no input"
    assert "⟦asked: ⟧answer. " in "\n".join(step_lines(found))


def test_each_step_of_a_run_in_stages_has_the_samples_of_its_stage(recipe: Recipe) -> None:
    staged = replace(
        recipe,
        stages=(
            Stage(name="broad", steps=3),
            Stage(name="long", steps=4, set=("budget.seq_len=256", "budget.batch_tokens=1024")),
        ),
    )
    assert [looked_at(staged, step, 1)["positions"] for step in (1, 3, 4, 7)] == [
        [0, 6],
        [12, 18],
        [18, 22],
        [30, 34],
    ]
    first, second = looked_at(staged, 3, 0), looked_at(staged, 4, 1)
    assert first["stage"] == {"index": 0, "name": "broad", "steps": [1, 3], "set": []}
    assert first["sample_ids"] == looked_at(recipe, 3, 0)["sample_ids"]
    assert second["stage"]["name"] == "long"
    assert (second["seq_len"], second["sequences"]) == (256, 4)
    assert second["rows"][0] == inspect_sample(staged, 18, NoProgress())
    lines = "\n".join(step_lines(second))
    assert "step 4 (stage long: budget.seq_len=256, budget.batch_tokens=1024)" in lines


def test_the_text_for_people_marks_what_is_only_read(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, closed = UNSCORED
    typed = [
        "debug",
        *("--data.corpus", "text", "--data.corpus.files", f"{tmp_path}/texts/**/*.txt"),
        *("--data.tokenizer", "bytes", "--data.cache", f"{tmp_path}/cache"),
        *("--data.packing", "best-fit", "--data.validation-fraction", "0"),
        *("--budget.seq-len", "128", "--budget.batch-tokens", "768", "--budget.steps", "2"),
    ]
    assert main(["data", "inspect", *typed, "--step", "2", "--rows", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 2: samples [6, 12), 6 sequences of 128\n")
    assert f"\n{opened}<|bos|>{closed}" in text
    assert "... and 4 samples more: --rows N shows so many" in text
    assert main(["data", "inspect", *typed, "--step", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4
    assert main(["data", "inspect", *typed, "--step", "3"]) == 2
    assert "--step 3\n       allowed: 1 to 2, the run's steps" in capsys.readouterr().err
    assert main(["data", "inspect", *typed, "--step", "1", "--sample", "1"]) == 2
    assert main(["data", "inspect", *typed, "--step", "1", "--rows", "-1"]) == 2
    with pytest.raises(UserError, match="1 to 8"):
        looked_at(recipe, 0)
