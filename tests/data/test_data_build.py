"""Building token stores: the same bytes whatever happens meanwhile; the cache; errors."""

from __future__ import annotations

import errno
import importlib
import os
import random
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import armillary.data.build as build_module
from armillary.data import cache, pieces, workers
from armillary.data.config import Bpe, Bytes, Data, File, JsonLines, Mixture, Part, Text
from armillary.data.store import build, locate, verify
from armillary.foundation.errors import RunError, UserError
from data_examples import (
    RecordedProgress,
    read_until,
    start_build,
    tree_digest,
    write_mixed_corpus,
    write_texts,
)


def texts_data(tmp_path: Path, **values: Any) -> Data:
    corpus = Text(files=(f"{tmp_path}/texts/**/*.txt",))
    return Data(**{"corpus": corpus, "tokenizer": Bytes(), "cache": f"{tmp_path}/cache"} | values)


def age(folder: Path) -> None:
    """Makes files look as if they had been left alone for long."""
    for path in folder.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written a moment ago count as settled: the change time cannot be set back."""
    monkeypatch.setattr(cache, "_SETTLED_NS", -(10**18))


def test_a_build_killed_ten_times_equals_an_undisturbed_one_byte_for_byte(tmp_path: Path) -> None:
    corpus = write_mixed_corpus(tmp_path / "corpus")
    undisturbed = start_build(corpus, tmp_path / "undisturbed", workers=1)
    ticks = int(read_until(undisturbed, "ticks").split()[1])
    assert read_until(undisturbed, "torch") == "torch False"
    assert undisturbed.wait() == 0

    kill_points = random.Random(20_250_101).choices(range(1, ticks), k=10)
    for kill_point in kill_points:
        process = start_build(corpus, tmp_path / "killed", workers=2, stop_at=kill_point)
        read_until(process, "stopped")
        process.kill()
        assert process.wait() < 0
        process.communicate()
        assert not (tmp_path / "killed" / "stores").exists() or not any(
            (tmp_path / "killed" / "stores").iterdir()
        )
    last = start_build(corpus, tmp_path / "killed", workers=2)
    folder = Path(read_until(last, "store").split(" ", 1)[1])
    assert last.wait() == 0

    assert tree_digest(tmp_path / "killed/stores") == tree_digest(tmp_path / "undisturbed/stores")
    assert verify(folder) == []
    assert list((tmp_path / "killed/building").iterdir()) == []


def test_of_two_builds_at_once_the_second_waits_and_uses_the_first_ones_store(
    tmp_path: Path,
) -> None:
    corpus = write_mixed_corpus(tmp_path / "corpus", texts=50)
    first = start_build(corpus, tmp_path / "cache", stop_at=2)
    read_until(first, "stopped")
    second = start_build(corpus, tmp_path / "cache")
    read_until(second, "task waiting for another process")
    assert first.stdin is not None
    first.stdin.write("\n")
    first.stdin.flush()
    store = read_until(first, "store")
    output, _ = second.communicate()
    assert first.wait() == second.returncode == 0
    assert store in output
    assert "task tokenising" not in output


def test_stores_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10_000)
    write_texts(tmp_path / "texts", 150)
    tokenizer = Bpe(vocab_size=300, training_bytes=20_000)
    found = []
    for count in (1, 3):
        data = texts_data(tmp_path, tokenizer=tokenizer, workers=count, cache=f"{tmp_path}/{count}")
        found.append(tree_digest(build(data).folder))
    assert found[0] == found[1]
    assert len(found[0]) == 14


def test_the_store_holds_every_document_whole_with_the_asked_special_tokens(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 60)
    texts = {path.relative_to(tmp_path / "texts").as_posix(): path.read_bytes()
             for path in (tmp_path / "texts").rglob("*.txt")}  # fmt: skip
    for bos, eos in ((True, True), (False, True), (True, False), (False, False)):
        store = build(texts_data(tmp_path, bos=bos, eos=eos, validation_fraction=0.2))
        seen = {}
        for split in store.splits.values():
            for index, identifier in enumerate(split.ids):
                ids = split.document(index).tolist()
                assert (ids[0] == 256) == bos
                assert (ids[-1] == 257) == eos
                seen[identifier] = bytes(ids[int(bos) : len(ids) - int(eos)])
            assert split.n_bytes == sum(len(texts[identifier]) for identifier in split.ids)
            assert list(split.ids) == sorted(split.ids)
        assert seen == texts
        held_out = store.splits["validation"]
        assert [texts[identifier] for identifier in held_out.ids] == list(
            held_out.documents_bytes()
        )


def test_which_documents_are_held_out_depends_on_nothing_but_their_ids(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 80)
    before = set(build(texts_data(tmp_path, validation_fraction=0.3)).splits["validation"].ids)
    write_texts(tmp_path / "texts", 120, seed=9)  # others' content changes, more come
    more = set(build(texts_data(tmp_path, validation_fraction=0.3)).splits["validation"].ids)
    assert {name for name in more if int(name[-9:-4]) < 80} == before
    fewer = set(build(texts_data(tmp_path, validation_fraction=0.1)).splits["validation"].ids)
    assert fewer < more


def test_bpe_learns_from_training_documents_only_in_no_particular_order(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 40)
    data = texts_data(tmp_path, tokenizer=Bpe(vocab_size=290), validation_fraction=0.3)
    store = build(data)
    for name in store.splits["validation"].ids:
        (tmp_path / "texts" / name).write_text("Zanzibar Zanzibar " * 50)
    changed = build(data)
    assert changed.fingerprint != store.fingerprint
    assert changed.tokenizer.fingerprint == store.tokenizer.fingerprint


def test_parts_of_a_mixture_are_apart_and_weights_rebuild_nothing(
    tmp_path: Path, settled: None
) -> None:
    write_mixed_corpus(tmp_path, texts=40)
    lines = JsonLines(files=(f"{tmp_path}/*.jsonl",))
    texts = Text(files=(f"{tmp_path}/texts/[0-6]/*.txt",))
    stores = []
    progress = RecordedProgress()
    for weight in (1.0, 3.0):
        corpus = Mixture(parts=(Part(corpus=texts), Part(corpus=lines, weight=weight)))
        stores.append(build(texts_data(tmp_path, corpus=corpus, validation_fraction=0.2), progress))
    assert [store.weights for store in stores] == [(1.0, 1.0), (1.0, 3.0)]
    assert stores[0].folder == stores[1].folder
    counts = [
        train.n_documents + held_out.n_documents
        for train, held_out in zip(stores[0].train, stores[0].validation, strict=True)
    ]
    assert counts == [40, 180]
    assert stores[0].train[1].ids[0].startswith("lines-0.jsonl@")


def test_an_unchanged_corpus_is_found_without_reading_it(
    tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "texts", 60)
    data = texts_data(tmp_path)
    assert locate(data) is None
    store = build(data)
    assert locate(data) == store.folder
    read = Path.read_bytes

    def read_no_text(path: Path) -> bytes:
        assert path.suffix != ".txt", path
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_no_text)
        patch.setattr(build_module, "_Build", None)
        assert build(data).fingerprint == store.fingerprint
    progress = RecordedProgress()
    age(tmp_path / "texts")  # other times, same content: read, but not tokenised again
    assert build(data, progress).fingerprint == store.fingerprint
    assert "tokenising" not in progress.done
    changed = next((tmp_path / "texts").rglob("*.txt"))
    changed.write_text(changed.read_text().swapcase())
    assert build(data).fingerprint != store.fingerprint
    assert verify(store.folder) == []


def test_files_that_have_only_just_changed_are_read_again(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 60)
    build(texts_data(tmp_path))
    assert locate(texts_data(tmp_path)) is None


def test_torn_pieces_and_damaged_stores_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 5_000)
    write_texts(tmp_path / "texts", 60)
    data = texts_data(tmp_path, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "assemble", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(data)
    torn = sorted((tmp_path / "cache/building").rglob("*.tokens"))
    torn[0].write_bytes(torn[0].read_bytes()[:-7])
    torn[1].write_bytes(b"")
    store = build(data)
    whole = tree_digest(store.folder)
    clean = build(texts_data(tmp_path, cache=f"{tmp_path}/other"))
    assert whole == tree_digest(clean.folder)
    (store.folder / "part-0/train/tokens.npy").unlink()
    assert tree_digest(build(data).folder) == whole


def test_every_kind_of_unusable_corpus_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_bytes(b"")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "data.corpus (text) is empty: no document has any text (1 are empty)"),
        ({"corpus": Text(files=("nowhere/*.txt",))}, "'nowhere/*.txt' matches no file"),
        ({"corpus": Text(files=(str(tmp_path),))}, "is a folder"),
        ({"corpus": Text()}, "data.corpus.files is empty"),
        ({"corpus": Text(files=("x",), on_bad_text="ignore")}, "on_bad_text = 'ignore'"),
        ({"corpus": Mixture()}, "data.corpus.parts is empty"),
        (
            {"corpus": Mixture(parts=(Part(corpus=Mixture(), weight=-1.0),))},
            "data.corpus.parts.0.weight = -1.0",
        ),
        ({"validation_fraction": 1.0}, "data.validation_fraction = 1.0"),
        ({"workers": -1}, "data.workers = -1"),
        ({"tokenizer": Bpe(vocab_size=100)}, "data.tokenizer.vocab_size = 100"),
        ({"tokenizer": File()}, "data.tokenizer.path is empty"),
    ]
    for values, message in cases:
        with pytest.raises(UserError) as caught:
            build(texts_data(tmp_path, **values))
        assert message in str(caught.value), (message, str(caught.value))
    assert list((tmp_path / "cache").rglob("manifest.json")) == []


def test_splits_without_documents_are_errors_that_say_how_to_get_some(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 1)
    with pytest.raises(UserError, match="no validation document: of 1 documents") as caught:
        build(texts_data(tmp_path, validation_fraction=0.01))
    assert "--data.corpus.separator" in str(caught.value)
    (tmp_path / "one.jsonl").write_text('{"text": "One line."}\n')
    lines = JsonLines(files=(str(tmp_path / "one.jsonl"),))
    with pytest.raises(UserError, match=r"--data\.validation-fraction 0 ") as caught:
        build(texts_data(tmp_path, corpus=lines, validation_fraction=0.01))
    assert "separator" not in str(caught.value)
    with pytest.raises(UserError, match="nothing to train on: all 1 documents are held out"):
        build(texts_data(tmp_path, validation_fraction=0.999999))
    none = build(texts_data(tmp_path, validation_fraction=0.0))
    assert none.splits["validation"].n_documents == none.splits["validation"].n_tokens == 0
    assert list(none.splits["validation"].documents_bytes()) == []


def test_all_unreadable_documents_are_named_at_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 30)
    (tmp_path / "texts/bad-1.txt").write_bytes(b"fine so far \xff no")
    (tmp_path / "texts/bad-2.txt").write_bytes(b"\xe9")
    (tmp_path / "texts/gone.txt").symlink_to(tmp_path / "nowhere")
    for count in (1, 2):
        with pytest.raises(UserError) as caught:
            build(texts_data(tmp_path, workers=count))
        text = str(caught.value)
        assert "bad-1.txt: byte 12 is not UTF-8 text" in text
        assert "bad-2.txt: byte 0 is not UTF-8 text" in text
        assert "gone.txt: No such file or directory" in text
        assert "--data.corpus.on-bad-text replace" in text


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.ENOSPC, RunError, "no space left for token stores in"),
        (errno.EROFS, UserError, "data.cache: cannot write in"),
    ],
)
def test_a_full_or_read_only_cache_is_a_clear_error_and_harms_no_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[Exception],
    message: str,
) -> None:
    write_texts(tmp_path / "texts", 60)
    store = build(texts_data(tmp_path))
    before = tree_digest(store.folder)

    def fail(path: Path, content: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "_replace", fail)
        with pytest.raises(kind, match=message) as caught:
            build(texts_data(tmp_path, eos=False, workers=1))
    assert "--data.cache FOLDER" in str(caught.value)
    assert tree_digest(store.folder) == before
    assert build(texts_data(tmp_path, eos=False)).fingerprint != store.fingerprint


def test_a_cache_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 5)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"data\.cache: cannot write in"):
        build(texts_data(tmp_path, cache=f"{tmp_path}/file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_corpus_that_changes_between_its_two_readings_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "texts", 60)
    encode = build_module.encode_piece

    def change_then_encode(*arguments: Any) -> None:
        next((tmp_path / "texts").rglob("*.txt")).write_text("else")
        encode(*arguments)

    monkeypatch.setattr(build_module, "encode_piece", change_then_encode)
    with pytest.raises(RunError, match=r"file-\d+\.txt changed while the corpus was being built"):
        build(texts_data(tmp_path, workers=1))


def test_what_workers_raise_arrives_and_a_dead_worker_is_named() -> None:
    with workers.WorkerPool(2) as pool:
        assert dict(pool.run(divmod, [(7, 2), (9, 4), (1, 1)])) == {
            0: (3, 1),
            1: (2, 1),
            2: (1, 0),
        }
    with pytest.raises(ZeroDivisionError), workers.WorkerPool(2) as pool:
        list(pool.run(divmod, [(1, 1), (1, 0)]))
    with (
        pytest.raises(RunError, match=r"a data worker died \(exit code 3"),
        workers.WorkerPool(2) as pool,
    ):
        list(pool.run(os._exit, [(3,), (3,)]))
    with pytest.raises(OSError, match="missing") as caught, workers.WorkerPool(2) as pool:
        list(pool.run(os.stat, [("missing",), ("missing",)]))
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(UserError, match="is not a token store"), workers.WorkerPool(2) as pool:
        from armillary.data.token_store import read_manifest

        list(pool.run(read_manifest, [(Path("nowhere"),)] * 2))


def test_a_call_or_an_answer_that_cannot_travel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "only_here", ModuleType("only_here"))
    exec("def call(number): pass", vars(sys.modules["only_here"]))
    call = sys.modules["only_here"].call
    with pytest.raises(ModuleNotFoundError, match="only_here"), workers.WorkerPool(2) as pool:
        list(pool.run(call, [(1,), (2,)]))
    with pytest.raises(TypeError, match="pickle"), workers.WorkerPool(2) as pool:
        list(pool.run(memoryview, [(b"1",), (b"2",)]))
    # The current folder counts where this interpreter's path has it, as `python -c` does.
    (tmp_path / "in_this_folder.py").write_text("def call(number): return number + 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with workers.WorkerPool(2) as pool:
        call = importlib.import_module("in_this_folder").call
        assert dict(pool.run(call, [(1,), (2,)])) == {0: 2, 1: 3}
    sys.modules.pop("in_this_folder")


def test_classes_that_only_this_process_knows_are_read_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workers.runs_in_workers(Text())
    assert workers.runs_in_workers(pytest.MonkeyPatch())  # a package on the path
    source = "from armillary.data.config import Text\nclass Mine(Text):\n    pass\n"
    (tmp_path / "mine_alone.py").write_text(source)
    module = runpy.run_path(str(tmp_path / "mine_alone.py"), run_name="mine_alone")
    assert not workers.runs_in_workers(module["Mine"]())
    monkeypatch.syspath_prepend(tmp_path)
    assert workers.runs_in_workers(importlib.import_module("mine_alone").Mine())
    sys.modules.pop("mine_alone")


def test_pieces_cover_the_sources_in_order_and_stay_few(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 50)
    sources = Text(files=(f"{tmp_path}/texts/**/*.txt",)).sources()
    for least in (1, 1_000, 10**9):
        ranges = np.array(pieces.cut(sources)) if least == 1 else np.array(_cut(sources, least))
        assert ranges[0, 0] == 0
        assert ranges[-1, 1] == len(sources)
        assert (ranges[1:, 0] == ranges[:-1, 1]).all()


def _cut(sources: Any, least: int) -> list[tuple[int, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", least)
        return pieces.cut(sources)
