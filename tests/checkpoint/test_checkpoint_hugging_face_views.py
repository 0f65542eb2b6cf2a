"""Views and transforms: any box of any of them is that box of the whole, and inverses undo."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from armillary.checkpoint.hugging_face import views
from armillary.checkpoint.hugging_face.files import read_header
from armillary.checkpoint.hugging_face.source import (
    Box,
    Live,
    Source,
    Tally,
    narrowed,
    pieces_of,
    read_all,
    shape_of,
    whole,
)
from armillary.checkpoint.hugging_face.table import (
    Chain,
    Reorder,
    Same,
    Stack,
    Transform,
    Transpose,
    Weave,
)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def lives(*tensors: Tensor) -> list[Source]:
    return [Live(tensor) for tensor in tensors]


A, B = numbers(6, 5, 4), numbers(6, 5, 4) + 1
ORDER = torch.tensor([3, 0, 5, 1, 4, 2])
EXPECTED: dict[str, tuple[Source, Tensor]] = {
    "cast": (views.Cast(Live(A), torch.float64), A.double()),
    "transposed": (views.Transposed(Live(A)), A.mT),
    "stacked": (views.Stacked(tuple(lives(A[0], B[0]))), torch.stack((A[0], B[0]))),
    "indexed": (views.Indexed(Live(A), 2), A[2]),
    "woven": (
        views.Woven(tuple(lives(A, B)), 1),
        torch.stack((A, B), dim=2).flatten(1, 2),
    ),
    "strand": (views.Strand(Live(A), 0, 1, 2), A[1::2]),
    "reordered": (views.Reordered(Live(A), 0, ORDER), A[ORDER]),
    "fewer rows": (views.Resized(Live(A), 4), A[:4]),
    "more rows": (views.Resized(Live(A), 8), torch.cat((A, torch.zeros(2, 5, 4)))),
}


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes with something in them."""
    sides = [
        st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
            lambda pair: (min(pair), max(pair[1], min(pair) + 1))
        )
        for size in shape
    ]
    return st.tuples(*sides)


@pytest.mark.parametrize("name", EXPECTED)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_box_of_a_view_is_that_box_of_the_whole(name: str, data: st.DataObject) -> None:
    view, expected = EXPECTED[name]
    assert (view.shape, view.dtype) == (tuple(expected.shape), expected.dtype)
    box = data.draw(boxes(view.shape))
    assert torch.equal(view.read(box), narrowed(expected, box))


TRANSFORMS: dict[str, tuple[Transform, list[Tensor]]] = {
    "same": (Same(), [A]),
    "transpose": (Transpose(), [A, B]),
    "stack": (Stack(), [A[0], A[1], A[2]]),
    "weave": (Weave(2, dim=0), [A]),
    "reorder": (Reorder(ORDER), [A]),
    "reorder columns": (Reorder(torch.tensor([1, 3, 0, 2]), dim=2), [A]),
    "chain": (Chain((Transpose(), Weave(2, dim=1))), [A]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_way_back_of_a_transform_undoes_it(name: str) -> None:
    transform, theirs = TRANSFORMS[name]
    ours = transform.to_ours(lives(*theirs))
    back = transform.to_theirs(ours)
    assert all(torch.equal(read_all(b), t) for b, t in zip(back, theirs, strict=True))
    assert len(back) == len(theirs)


def test_pairs_of_neighbours_become_halves_in_the_rotated_part_of_each_head_only() -> None:
    order = views.halves_of_pairs(heads=2, plain=1, rotated=4)
    assert order.tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]


@given(shape=st.lists(st.integers(0, 9), max_size=4), most=st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_pieces_of_a_box_follow_each_other_and_are_small(shape: list[int], most: int) -> None:
    tensor = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()]
    tensor = tensor.view(shape)
    parts = list(pieces_of(whole(shape), 4, most))
    found = [narrowed(tensor, part).flatten() for part in parts]
    joined = torch.cat(found) if found else torch.empty(0, dtype=tensor.dtype)
    assert torch.equal(joined, tensor.flatten())
    assert all(torch.Size(shape_of(part)).numel() * 4 <= max(most, 4) for part in parts)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_gives_any_box_and_reads_no_more_than_whole_rows_of_it(
    data: st.DataObject, file: Path
) -> None:
    tensor, tally = FILED["wide"], Tally()
    source = read_header(file, tally)["wide"]
    box = data.draw(boxes(source.shape))
    assert torch.equal(source.read(box), narrowed(tensor, box))
    rows, middle, columns = shape_of(box)
    if columns * 2 >= 4096:
        assert tally.bytes_read == rows * middle * columns * 2
    else:  # whole rows cost less than many short reads
        assert tally.bytes_read == rows * middle * 3000 * 2


FILED = {
    "wide": numbers(7, 20, 3000).bfloat16(),
    "bias": numbers(3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    save_file(FILED, path)
    return path


def test_odd_shapes_come_out_of_a_file_too(file: Path) -> None:
    sources = read_header(file, Tally())
    assert all(torch.equal(read_all(sources[name]), FILED[name]) for name in FILED)


def test_float8_blocks_are_values_times_the_factor_of_their_block_rounded_once() -> None:
    weight = (numbers(150, 300) * 50).to(torch.float8_e4m3fn)
    scale = numbers(2, 3).abs() + 0.1
    view = views.Float8Blocks(Live(weight), Live(scale))
    expected = torch.empty(150, 300)
    for row in range(150):
        for column in range(300):
            factor = scale[row // 128, column // 128]
            expected[row, column] = float(weight[row, column]) * factor
    assert torch.equal(read_all(view), expected.bfloat16())
    box = ((100, 140), (120, 270))
    assert torch.equal(view.read(box), narrowed(expected.bfloat16(), box))


def test_mxfp4_gives_the_values_of_the_published_table_times_a_power_of_two() -> None:
    codes = torch.arange(32).view(1, 1, 32) % 16
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for exponent in (0, 120, 127, 130):
        scales = torch.tensor([[exponent]], dtype=torch.uint8)
        found = read_all(views.Mxfp4(Live(packed), Live(scales)))
        expected = torch.tensor(table * 2, dtype=torch.float64) * 2.0 ** (exponent - 127)
        assert torch.equal(found.double(), expected.view(1, 32))


def test_a_box_of_mxfp4_may_begin_and_end_within_a_block() -> None:
    packed = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 4, 2), dtype=torch.uint8)
    view = views.Mxfp4(Live(packed), Live(scales))
    assert view.shape == (3, 4, 64)
    box = ((1, 3), (0, 2), (5, 50))
    assert torch.equal(view.read(box), narrowed(read_all(view), box))


def test_a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 50) + b"{}")
    with pytest.raises(ValueError, match="has no header"):
        read_header(path, Tally())
