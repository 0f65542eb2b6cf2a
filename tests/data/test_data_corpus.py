"""Corpora: names of documents, decoding, cutting files into ranges, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import files as files_module
from armillary.data.config import (
    HuggingFace,
    JsonLines,
    Mixture,
    Parquet,
    Part,
    StandardLibrary,
    Text,
)
from armillary.data.corpus import CorpusConfig, Document, Source
from armillary.data.corpus_text import decode_python_source
from armillary.foundation.errors import Problem, UserError


def read(corpus: CorpusConfig) -> list[tuple[str, str]]:
    found = [item for source in corpus.sources() for item in corpus.read(source)]
    return [(item.id, item.text) for item in found if isinstance(item, Document)]


def problems(corpus: CorpusConfig) -> list[str]:
    return [
        item.render()
        for source in corpus.sources()
        for item in corpus.read(source)
        if isinstance(item, Problem)
    ]


def test_the_standard_library_is_every_module_by_its_relative_path() -> None:
    sources = {source.name: source for source in StandardLibrary().sources()}
    assert {"json/decoder.py", "ast.py"} <= sources.keys()
    assert not [name for name in sources if "site-packages" in name or "__pycache__" in name]
    assert len(sources) > 500
    (document,) = StandardLibrary().read(sources["ast.py"])
    assert not isinstance(document, Problem)
    assert document.text == Path(sources["ast.py"].path).read_bytes().decode()


def test_modules_that_are_not_utf_8_are_read_as_they_declare_or_with_replacements() -> None:
    assert (
        decode_python_source(b"# coding: latin-1\nx = '\xe9'\r\n")
        == "# coding: latin-1\nx = 'é'\r\n"
    )
    assert decode_python_source(b"# coding: nonsense\n'\xe9'") == "# coding: nonsense\n'\ufffd'"
    assert decode_python_source(b"'\xf6'") == "'\ufffd'"
    assert decode_python_source("\ufeff'ö'\n".encode()) == "\ufeff'ö'\n"


def test_text_files_are_named_relative_to_what_all_patterns_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/x.txt", "b/deep/y.txt", "b/z.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"{name}\r\n".encode())
    monkeypatch.setenv("HOME", str(tmp_path))
    both = Text(files=("~/b/**/*.*", f"{tmp_path}/a/*.txt", "~/a/x.txt"))
    names = ["a/x.txt", "b/deep/y.txt", "b/z.md"]
    assert read(both) == [(name, f"{name}\r\n") for name in names]
    assert [name for name, _ in read(Text(files=("~/b/**/*.txt",)))] == ["deep/y.txt"]
    monkeypatch.chdir(tmp_path / "b")
    assert [name for name, _ in read(Text(files=("z.md",)))] == ["z.md"]


def test_a_separator_cuts_a_file_into_documents_named_by_where_they_begin(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("one\n\ntwo é\n\n\n\nthree", "utf-8")
    corpus = Text(files=(f"{tmp_path}/all.txt",), separator="\\n\\n")
    assert read(corpus) == [
        ("all.txt@0", "one"),
        ("all.txt@5", "two é"),
        ("all.txt@13", ""),
        ("all.txt@15", "three"),
    ]


def test_text_that_is_not_utf_8_is_an_error_a_replacement_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good\nb\xe4d")
    file = str(tmp_path / "bad.txt")
    (message,) = problems(Text(files=(file,)))
    assert message == (
        f"error: {file}: byte 6 is not UTF-8 text\n       allowed: text in UTF-8\n"
        "       try: convert the file, or --data.corpus.on-bad-text replace (or skip)"
    )
    assert read(Text(files=(file,), on_bad_text="replace")) == [("bad.txt", "good\nb\ufffdd")]
    assert read(Text(files=(file,), on_bad_text="skip")) == []


@settings(deadline=None, max_examples=40)
@given(
    texts=st.lists(st.text(max_size=30), max_size=25),
    step=st.integers(1, 60),
    end=st.sampled_from(["\n", ""]),
)
def test_json_lines_are_the_same_documents_wherever_the_file_is_cut(
    texts: list[str], step: int, end: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_text("\n".join(lines) + end, "utf-8", errors="replace", newline="")
    corpus = JsonLines(files=(str(file),))
    whole = read(corpus)
    assert len(whole) == len(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "SOURCE_BYTES", step)
        assert len(corpus.sources()) == max(1, -(-file.stat().st_size // step))
        assert read(corpus) == whole


def test_compressed_json_lines_are_the_same_documents(tmp_path: Path) -> None:
    content = b'{"body": "one"}\n\n{"body": "\\u00e9 two", "other": 3}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    plain = read(JsonLines(files=(f"{tmp_path}/a.jsonl",), field="body"))
    packed = read(JsonLines(files=(f"{tmp_path}/b.jsonl.gz",), field="body"))
    assert plain == [("a.jsonl@0", "one"), ("a.jsonl@17", "é two")]
    assert [text for _, text in packed] == [text for _, text in plain]
    (tmp_path / "c.gz").write_bytes(gzip.compress(content)[:-9])
    assert "c.gz: not a whole .gz file" in problems(JsonLines(files=(f"{tmp_path}/c.gz",)))[-1]
    (tmp_path / "d.gz").write_bytes(content)
    assert "Not a gzipped file" in problems(JsonLines(files=(f"{tmp_path}/d.gz",)))[0]


def test_every_broken_line_is_named_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "SOURCE_BYTES", 20)
    file = tmp_path / "x.jsonl"
    file.write_bytes(
        b'{"text": "fine"}\n{"text": "cut\n[1]\n{"txet": "a", "id": 1}\n{"text": null}\n'
        b'{"text": "\\ud800"}\n{"text": "\xff"}\n{"text": {}}\n'
    )
    found = problems(JsonLines(files=(str(file),)))
    assert [message.splitlines()[0].removeprefix(f"error: {file}") for message in found] == [
        ":2 is not JSON: Unterminated string starting at: line 1 column 10 (char 9)",
        ":3 is a JSON array",
        ":4 has no field 'text'",
        ":5: field 'text' is a JSON null",
        ":6: character 0 is half of a surrogate pair",
        ":7: byte 102 is not UTF-8 text",
        ":8: field 'text' is a JSON object",
    ]
    assert "allowed: fields of that line: id, txet" in found[2]
    replaced = JsonLines(files=(str(file),), on_bad_text="replace")
    assert len(problems(replaced)) == 5


def test_parquet_rows_are_documents_by_row_group(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = ["one", None, "three é", "four", ""]
    parquet.write_table(
        pyarrow.table({"text": rows, "raw": [b"a", b"\xff", b"c", b"d", b"e"], "n": range(5)}),
        tmp_path / "t.parquet",
        row_group_size=2,
    )
    files = (f"{tmp_path}/*.parquet",)
    corpus = Parquet(files=files)
    assert len(corpus.sources()) == 3
    assert read(corpus) == [
        (f"t.parquet:{i}", row) for i, row in enumerate(rows) if row is not None
    ]
    assert "row 1: byte 0 is not UTF-8" in problems(Parquet(files=files, column="raw"))[0]
    assert "column 'n' holds a int" in problems(Parquet(files=files, column="n"))[0]
    (tmp_path / "u.parquet").write_bytes(b"not")
    with pytest.raises(UserError) as caught:
        Parquet(files=files, column="body").sources()
    assert "has no column 'body'\n       allowed: text, raw, n" in str(caught.value)
    assert "u.parquet is not a Parquet file" in str(caught.value)


def test_missing_libraries_are_named_by_their_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"armillary\[hub\]"):
        HuggingFace(name="c/d").sources()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"armillary\[parquet\]"):
        Parquet(files=("x",)).sources()


def test_a_mixture_reads_its_parts_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    (tmp_path / "b.jsonl").write_text('{"text": "B"}')
    corpus = Mixture(
        parts=(
            Part(corpus=JsonLines(files=(f"{tmp_path}/b.jsonl",))),
            Part(corpus=Text(files=(f"{tmp_path}/a.txt",)), weight=0.5),
        )
    )
    assert [text for _, text in read(corpus)] == ["B", "A"]
    assert pickle.loads(pickle.dumps(corpus)) == corpus


def test_sources_of_a_file_tell_when_it_changed(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("1")
    first: Source = Text(files=(str(file),)).sources()[0]
    file.write_text("22")
    second = Text(files=(str(file),)).sources()[0]
    assert first.stamp != second.stamp
    assert first.changed_ns <= second.changed_ns


def test_a_pipe_is_passed_over_by_a_glob_and_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    glob = str(tmp_path / "*.txt")
    with pytest.raises(UserError, match="matches no file"):
        Text(files=(glob,)).sources()
    (tmp_path / "plain.txt").write_text("words")
    assert read(Text(files=(glob,))) == [("plain.txt", "words")]
    with pytest.raises(UserError, match=r"pipe\.txt' is a pipe, a socket or a device"):
        Text(files=(str(tmp_path / "pipe.txt"),)).sources()
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserError, match=r"holds no \.py file"):
        StandardLibrary(folder=str(tmp_path)).sources()
