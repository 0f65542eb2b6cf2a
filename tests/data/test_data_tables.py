"""Tables as corpora: data sets of the Hugging Face library, and Parquet files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.config import HuggingFace, Parquet
from corpus_reading import problems, read

# Hugging Face ---------------------------------------------------------------------------------

ROWS = {"text": ["", "one", None, "long " * 3_000, "é"], "n": [1, 2, 3, 4, 5]}


def test_data_sets_saved_to_disk_are_read_with_and_without_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "many")
    expected = [(f"train:{row}", text) for row, text in enumerate(ROWS["text"]) if text is not None]
    assert read(HuggingFace(name=f"{tmp_path}/one")) == expected
    assert read(HuggingFace(name=f"{tmp_path}/many")) == expected
    assert read(HuggingFace(name=f"{tmp_path}/many", split="test")) == [("test:0", "one")]
    for corpus, words in (
        (HuggingFace(), "data.corpus.name is empty"),
        (HuggingFace(name=f"{tmp_path}/many", split="dev"), "allowed: train, test"),
        (HuggingFace(name=f"{tmp_path}/one", column="body"), "allowed: text, n"),
        (HuggingFace(name=f"{tmp_path}/one", column="n"), "row 0: column 'n' holds a int"),
    ):
        assert words in problems(corpus)[0]


def test_a_data_set_in_the_offline_cache_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(ROWS).to_parquet(tmp_path / "rows.parquet")
    built = datasets.load_dataset(
        "parquet", data_files={"train": str(tmp_path / "rows.parquet")}, cache_dir=str(tmp_path)
    )
    made = Path(built["train"].cache_files[0]["filename"]).parent
    cached = tmp_path / "cache" / "me___set" / "default" / "0.0.0" / ("a" * 40)
    shutil.copytree(made, cached)
    (cached / "parquet-train.arrow").rename(cached / "set-train.arrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert [text for _, text in read(HuggingFace(name="me/set"))] == [
        text for text in ROWS["text"] if text is not None
    ]
    (message,) = problems(HuggingFace(name="me/other"))
    assert "cannot load me/other (default, split train)" in message


def test_a_damaged_data_set_on_disk_is_a_problem(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for name in ("cut", "state"):
        datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / name)
    arrow = next((tmp_path / "cut").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[: arrow.stat().st_size // 2])
    (tmp_path / "state" / "state.json").write_text("{")
    for name in ("cut", "state"):
        (message,) = problems(HuggingFace(name=f"{tmp_path}/{name}"))
        assert f"cannot load {tmp_path}/{name}" in message


# Parquet --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(at=st.integers(0, 700), new=st.binary(min_size=1, max_size=8), cut=st.booleans())
def test_damage_to_a_parquet_file_is_a_problem_or_other_text(
    at: int, new: bytes, cut: bool, *, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path_factory.mktemp("tables") / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "", None, "x" * 99]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:at] + new + (b"" if cut else content[at + len(new) :]))
    for message in problems(Parquet(files=(str(path),))):
        assert str(path) in message
