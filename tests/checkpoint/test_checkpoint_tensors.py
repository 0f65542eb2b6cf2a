"""The format of tensors: what is written once, read in part, and refused when it is odd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from armillary.checkpoint.manifest import Unverified
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.place import Place, Written
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.tensors import (
    INDEX_NAME,
    Piece,
    Planner,
    flatten,
    pieces_of,
    read_tensor,
    read_tensors,
    stored_tensors,
    write_tensors,
)
from armillary.checkpoint.tensors import read as reading
from armillary.checkpoint.tensors.index import DTYPES, parse_index
from armillary.foundation.errors import RunError, UserError
from ranks import run_ranks

FOLDER = "draft"


def every_kind() -> dict[str, Tensor]:
    """A tensor of each dtype, and of each odd shape and memory layout."""
    torch.manual_seed(0)
    tensors = {n: (torch.randn(3, 5) * 9).to(dtype) for n, dtype in DTYPES.items()}
    return tensors | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(9, 4)[::2, 1:3],
        "names.with spaces, and ünïcode": torch.arange(3),
    }


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write(
    place: Place, tensors: dict[str, Tensor], file_bytes: int = 1 << 32
) -> dict[str, Written]:
    return write_tensors(pieces_of(tensors), place, FOLDER, Ranks(), Planner(file_bytes))


def read(place: Place, tensors: dict[str, Tensor]) -> int:
    return read_tensors(place, FOLDER, tensors, Ranks(), stored_tensors(place, FOLDER))


@pytest.mark.parametrize("file_bytes", [1 << 32, 100])
def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path: Path, file_bytes: int) -> None:
    place, tensors = LocalPlace(tmp_path), every_kind()
    written = write(place, tensors, file_bytes)
    assert {n: w.bytes for n, w in written.items()} == place.files(FOLDER)
    assert (len(written) > 5) == (file_bytes == 100)
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert read(place, filled) == sum(t.numel() * t.itemsize for t in tensors.values())
    stored = stored_tensors(place, FOLDER)
    for name, tensor in tensors.items():
        assert torch.equal(bits(filled[name]), bits(tensor)), name
        assert torch.equal(bits(read_tensor(place, FOLDER, stored[name])), bits(tensor)), name


def test_the_files_are_safetensors_that_others_can_read(tmp_path: Path) -> None:
    tensors = every_kind()
    write(LocalPlace(tmp_path), tensors)
    with safe_open(tmp_path / FOLDER / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == tensors.keys() - {"empty"}
        for name in file.keys():  # noqa: SIM118
            if not name.startswith("F8_E8M0"):  # which older releases of the library do not know
                assert torch.equal(bits(file.get_tensor(name)), bits(tensors[name])), name


def placements_of_four() -> dict[str, tuple[tuple[int, int], list[Placement], tuple[int, ...]]]:
    """Meshes of four ranks, and tensors on them: whole, cut evenly, unevenly, twice, to nothing."""
    return {
        "copied": ((2, 2), [Replicate(), Replicate()], (6, 4)),
        "copied and cut": ((2, 2), [Replicate(), Shard(0)], (7, 3)),
        "cut and copied": ((2, 2), [Shard(1), Replicate()], (5, 7)),
        "cut twice": ((2, 2), [Shard(0), Shard(1)], (5, 6)),
        "one dim cut twice": ((2, 2), [Shard(0), Shard(0)], (7, 2)),
        "uneven": ((1, 4), [Replicate(), Shard(0)], (6, 2)),
        "nothing for the last ones": ((1, 4), [Replicate(), Shard(0)], (2, 3)),
        "vector": ((2, 2), [Shard(0), Replicate()], (9,)),
    }


def whole_tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    shapes = {name: shape for name, (_, _, shape) in placements_of_four().items()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def spread() -> dict[str, Tensor]:
    tensors = {}
    for name, (mesh, placements, _) in placements_of_four().items():
        where = init_device_mesh("cpu", mesh)
        tensors[name] = distribute_tensor(whole_tensors()[name], where, placements)
    return tensors


def local_pieces() -> list[tuple[str, tuple[int, ...], Tensor]]:
    return [(p.name, p.offset, p.data.clone()) for p in pieces_of(spread())]


def test_pieces_of_dtensors_lie_where_torch_put_them() -> None:
    covered = {name: torch.full_like(whole, math.nan) for name, whole in whole_tensors().items()}
    for pieces in run_ranks(local_pieces, 4):
        for name, offset, data in pieces:
            box = covered[name]
            for dim, (start, size) in enumerate(zip(offset, data.shape, strict=True)):
                box = box.narrow(dim, start, size)
            box.copy_(data)
    for name, box in covered.items():
        assert torch.equal(box, whole_tensors()[name]), name


def write_spread(folder: Path) -> list[tuple[list[str], int, int]]:
    """Three saves of the same state and one of another; what each wrote here, and exchanges."""
    ranks, planner, told = Ranks(), Planner(), []
    tensors = spread()
    for number in range(4):
        if number == 3:
            tensors["one more"] = torch.ones(2)
        place = LocalPlace(folder / str(number))
        write_tensors(pieces_of(tensors), place, FOLDER, ranks, planner)
        files = planner.plan(pieces_of(tensors), ranks).files
        own = [entry for file in files for entry in file.entries]
        titles = [entry.title for entry in own]
        told.append((titles, sum(entry.bytes for entry in own), planner.exchanges))
    ranks.close()
    return told


def read_spread(folder: Path) -> tuple[int, int]:
    """Reads onto other placements; bytes read here and bytes that were wanted here."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    filled = {
        name: distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
        for name, whole in whole_tensors().items()
    }
    place, ranks = LocalPlace(folder / "0"), Ranks()
    count = read_tensors(place, FOLDER, filled, ranks, stored_tensors(place, FOLDER))
    for name, whole in whole_tensors().items():
        assert torch.equal(filled[name].full_tensor(), whole), name
    ranks.close()
    return count, sum(t.to_local().numel() * 4 for t in filled.values())


def test_copies_are_written_once_by_all_alike_and_planned_once(tmp_path: Path) -> None:
    per_rank = run_ranks(write_spread, 4, tmp_path)
    first = [saves[0] for saves in per_rank]
    titles = [title for own, _, _ in first for title in own]
    assert len(titles) == len(set(titles)), "a piece was written twice"
    assert sum(size for _, size, _ in first) == sum(4 * t.numel() for t in whole_tensors().values())
    sizes = [size for _, size, _ in first]
    assert max(sizes) <= 1.25 * sum(sizes) / 4, sizes
    for saves in per_rank:
        assert [exchanges for _, _, exchanges in saves] == [1, 1, 1, 2]
    whole = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
    place = LocalPlace(tmp_path / "0")
    read(place, whole)
    for name, tensor in whole_tensors().items():
        assert torch.equal(whole[name], tensor), name


def test_each_rank_reads_the_rows_that_it_needs_and_no_others(tmp_path: Path) -> None:
    write(LocalPlace(tmp_path / "0"), whole_tensors())
    for count, wanted in run_ranks(read_spread, 3, tmp_path):
        assert count == wanted


def test_columns_cost_the_rows_they_are_part_of_and_large_pieces_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole = LocalPlace(tmp_path), torch.randn(64, 8)
    write(place, {"a": whole, "b": whole + 1})
    monkeypatch.setattr(reading, "_READ_BYTES", 100)
    sizes = []
    original = LocalPlace.read

    def counted(self: LocalPlace, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length is not None:
            sizes.append(length)
        return original(self, name, start, length)

    monkeypatch.setattr(LocalPlace, "read", counted)
    columns = torch.zeros(10, 3)
    piece = Piece("a", (64, 8), (20, 5), columns)
    assert reading._read(place, FOLDER, [piece], stored_tensors(place, FOLDER)) == 10 * 8 * 4
    assert torch.equal(columns, whole[20:30, 5:])
    assert max(sizes) <= 100


def test_a_file_that_is_cut_off_after_it_was_verified_is_an_error(
    tmp_path: Path,
) -> None:
    place = LocalPlace(tmp_path)
    write(place, {"a": torch.randn(64, 8)})
    stored = stored_tensors(place, FOLDER)
    file = tmp_path / FOLDER / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match="ends within a tensor"):
        read_tensors(place, FOLDER, {"a": torch.zeros(64, 8)}, Ranks(), stored)
    with pytest.raises(UserError, match="lies beyond the end"):
        stored_tensors(place, FOLDER)
    file.unlink()
    with pytest.raises(UserError, match="file that is not there"):
        stored_tensors(place, FOLDER)
    (tmp_path / FOLDER / INDEX_NAME).unlink()
    with pytest.raises(RunError, match=INDEX_NAME):
        stored_tensors(place, FOLDER)


PIECE = {"offset": [0, 0], "shape": [2, 3], "file": "rank-00000.safetensors", "start": 8}
ENTRY = {"dtype": "F32", "shape": [2, 3], "pieces": [PIECE]}
FILES = {"rank-00000.safetensors": 32, "manifest.json": 100}


def index(entry: Any = None, **changes: Any) -> bytes:
    """An index of one tensor: as it should be, but for changes to it or to its piece."""
    piece = {**PIECE, **{n: v for n, v in changes.items() if n in PIECE and n != "shape"}}
    piece["shape"] = changes.get("piece_shape", PIECE["shape"])
    whole = {**ENTRY, "pieces": [piece], **{n: v for n, v in changes.items() if n in ENTRY}}
    return json.dumps({"a": whole if entry is None else entry}).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "unreadable"),
        (b"[" * 100_000, "unreadable"),
        (b'{"a": NaN}', "unreadable"),
        (b'{"a": 1, "a": 2}', "unreadable"),
        (index().replace(b"8", b"9" * 5000), "unreadable"),
        (b"[]", "not an index"),
        (index([]), "not a tensor"),
        (index({}), "not a tensor"),
        (index({**ENTRY, "code": "import os"}), "not a tensor"),
        (index(dtype="pickle"), "dtype"),
        (index(dtype=[["F32"]]), "dtype"),
        (index(shape="23"), "shape or place"),
        (index(shape=[2, -3]), "shape or place"),
        (index(shape=[2, 3.0]), "shape or place"),
        (index(shape=[True, 3]), "shape or place"),
        (index(shape=[1 << 50, 1 << 50]), "would have"),
        (index(shape=[1] * 65), "shape or place"),
        (index(pieces={}), "no list"),
        (index(pieces=[]), "not all there"),
        (index(pieces=[PIECE, PIECE]), "twice"),
        (index(pieces=["x"]), "a piece that is none"),
        (index(offset=[0]), "other dims"),
        (index(offset=[1, 0]), "outside"),
        (index(piece_shape=[2, 2]), "not all there"),
        (index(shape=[4, 3], pieces=[PIECE, {**PIECE, "offset": [1, 0]}]), "not all there"),
        (index().replace(b'"a"', b'"\\ud800"'), "a name that is none"),
        (index().replace(b'"a"', b'"\\u001b[2J"'), "a name that is none"),
        (index(shape=[0, 3], piece_shape=[0, 3]), "empty piece"),
        (index(start=-1), "shape or place"),
        (index(start=9), "beyond the end"),
        (index(file="../rank-00000.safetensors"), "not there"),
        (index(file="/etc/passwd"), "not there"),
        (index(file="manifest.json"), "not there"),
        (index(file="rank-00001.safetensors"), "not there"),
        (index(file=["rank-00000.safetensors"]), "not there"),
    ],
)
def test_an_index_that_does_not_hold_together_is_refused(data: bytes, words: str) -> None:
    parse_index(index(), FILES)
    with pytest.raises(Unverified, match=words):
        parse_index(data, FILES)


ODD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
) | st.sampled_from([0, 1, 2, 3, 8, 24, [0, 0], [2, 3], [1, 3], [], "F64", "U8", PIECE, [PIECE]])


CHANGES = st.tuples(st.sampled_from([*ENTRY, *PIECE]), st.booleans(), ODD_VALUES)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*ENTRY, *PIECE]), st.booleans(), ODD_VALUES), max_size=3)
)
def test_whatever_an_index_says_nothing_is_read_outside_its_files(
    changes: list[tuple[str, bool, Any]],
) -> None:
    entry, piece = dict(ENTRY), dict(PIECE)
    for name, of_the_piece, value in changes:
        (piece if (of_the_piece and name in PIECE) or name not in ENTRY else entry)[name] = value
    if entry["pieces"] == [PIECE]:
        entry["pieces"] = [piece]
    try:
        stored = parse_index(json.dumps({"a": entry}).encode(), FILES)
    except Unverified:
        return
    for each in stored.values():
        for part in each.pieces:
            size = math.prod(part.shape) * each.dtype.itemsize
            assert 0 <= part.start <= part.start + size <= FILES[part.file]


def test_nested_names_become_dotted_ones_and_share_memory() -> None:
    weight = torch.zeros(2)
    flat = flatten({"model": {"a": weight, "b": {"c": weight}}, "d": weight})
    assert list(flat) == ["model.a", "model.b.c", "d"]
    flat["d"].fill_(1)
    assert bool((weight == 1).all())
