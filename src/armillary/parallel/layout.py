"""How each whole parameter is cut over the ranks: what initialisation, checkpoints, norms and
optimizers need to know of it, and nothing else does.

Modules compute on plain local tensors, smaller than the whole parameter. A layout says which part
of the whole they are: axes of the mesh, in the order in which they cut, each with the dim that it
cuts as `torch.chunk` does (equal parts, the last ones smaller or empty). An axis that does not cut
holds copies.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

View = Literal["dense", "expert"]

CUTTING_AXES: dict[View, tuple[str, ...]] = {
    "dense": ("tp", "fsdp"),
    "expert": ("ep", "expert_tp", "expert_fsdp"),
}
"""Axes that may cut a parameter of each view, in the order in which they do."""

COPYING_AXES = ("dp_replicate",)
"""Axes that always hold copies of a parameter (`pp` holds it on one stage)."""

Range = tuple[int, int]
"""Indices [start, end) of one dim."""


class Place(Protocol):
    """A rank's place in a mesh; `Mesh` is one for this rank."""

    def degree(self, axis: str) -> int:
        """Ranks of an axis."""

    def coordinate(self, axis: str) -> int:
        """This rank's place in its group of an axis."""


class ArrangedRanks(Protocol):
    """The places of all ranks; `Grid` is one."""

    def degree(self, axis: str) -> int:
        """Ranks of an axis."""

    def coordinate(self, rank: int, axis: str) -> int:
        """A rank's place in its group of an axis."""


class ViewedMesh(Place, Protocol):
    """A place whose axes torch knows too; `Mesh` is one."""

    @property
    def dense_view(self) -> DeviceMesh | None:
        """Axes of the weights outside experts; None without a process group."""

    @property
    def expert_view(self) -> DeviceMesh | None:
        """Axes of the experts' weights."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of any rank, known without being there."""

    ranks: ArrangedRanks
    rank: int

    def degree(self, axis: str) -> int:
        """See `Place.degree`."""
        return self.ranks.degree(axis)

    def coordinate(self, axis: str) -> int:
        """See `Place.coordinate`."""
        return self.ranks.coordinate(self.rank, axis)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one whole parameter (or buffer) is cut."""

    shape: tuple[int, ...]
    """Of the whole."""
    splits: tuple[tuple[str, int], ...] = ()
    """(axis, dim) in the order of cutting."""
    partial: tuple[str, ...] = ()
    """Axes over which its gradient is a sum that is still to be made after the backward pass."""
    view: View = "dense"
    """Which arrangement of the ranks its axes are of."""

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that cut it."""
        return tuple(axis for axis, _ in self.splits)

    def split(self, axis: str, dim: int) -> Layout:
        """The layout after one more cut; one that is there already changes nothing."""
        if (axis, dim) in self.splits:
            return self
        view: View = "expert" if axis in CUTTING_AXES["expert"] else self.view
        order = CUTTING_AXES[view]
        splits = (*self.splits, (axis, dim))
        places = [order.index(name) for name, _ in splits]
        assert places == sorted(set(places)), f"cuts {splits} are not in the order {order}"
        assert 0 <= dim < len(self.shape), f"no dim {dim} in {self.shape}"
        return dataclasses.replace(self, splits=splits, view=view)


class Layouts(dict[str, Layout]):
    """The layouts of a model by canonical name: of tied parameters, the name that comes first.

    The passes record here what they cut; every rank records the same for what it holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.aliases: dict[str, str] = {}
        """Further names of tied parameters, to their canonical ones."""
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    @classmethod
    def of(cls, model: nn.Module) -> Layouts:
        """Of a whole model, before any pass has cut it: parameters and persistent buffers."""
        layouts = cls()
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if (canonical := first.setdefault(id(tensor), name)) == name:
                layouts[name] = Layout(tuple(tensor.shape))
            else:
                layouts.aliases[name] = canonical
        return layouts

    def canonical(self, name: str) -> str:
        """The name under which a parameter's layout is kept."""
        return self.aliases.get(name, name)

    def layout(self, name: str) -> Layout:
        """The layout of a parameter by any of its names."""
        return self[self.canonical(name)]

    def split(self, name: str, axis: str, dim: int) -> None:
        """Records that an axis cuts a dim, after the cuts recorded so far."""
        self[self.canonical(name)] = self.layout(name).split(axis, dim)

    def mark_partial(self, name: str, axis: str) -> None:
        """Records that gradients must be summed over an axis after the backward pass."""
        layout = self.layout(name)
        if axis not in layout.partial:
            partial = (*layout.partial, axis)
            self[self.canonical(name)] = dataclasses.replace(layout, partial=partial)

    def view_as_expert(self, name: str) -> None:
        """Records that a parameter, not cut so far, is arranged as the experts are."""
        layout = self.layout(name)
        assert not layout.splits, f"{name} is cut as {layout.splits} already"
        self[self.canonical(name)] = dataclasses.replace(layout, view="expert")


def split_parameter(
    module: nn.Module,
    attribute: str,
    name: str,
    layouts: Layouts,
    place: Place,
    *,
    axis: str,
    dim: int,
) -> None:
    """Replaces `module.attribute` by this rank's part of it on `meta`, and records the cut.

    Two modules that share a parameter share its part, if this is called for both of them.

    Args:
        module: whose parameter it is.
        attribute: its name in the module.
        name: its name in the model.
        layouts: where the cut is recorded.
        place: this rank's; a degree of 1 cuts nothing.
        axis: the axis that cuts.
        dim: the dim that is cut.
    """
    if place.degree(axis) == 1:
        return
    parameter = module.get_parameter(attribute)
    assert parameter.is_meta, f"{name} has values already, which cutting would lose"
    if id(parameter) not in layouts._replaced:
        start, end = _part((0, parameter.shape[dim]), place, axis)
        shape = [*parameter.shape]
        shape[dim] = end - start
        part = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
        layouts._replaced[id(parameter)] = parameter, part  # both are held: an id is not reused
    setattr(module, attribute, layouts._replaced[id(parameter)][1])
    layouts.split(name, axis, dim)


def local_ranges(layout: Layout, place: Place) -> list[Range]:
    """Which indices of each dim of the whole parameter are held at a place."""
    ranges = [(0, size) for size in layout.shape]
    for axis, dim in layout.splits:
        ranges[dim] = _part(ranges[dim], place, axis)
    return ranges


def local_shape(layout: Layout, place: Place) -> tuple[int, ...]:
    """The shape of what is held at a place."""
    return tuple(end - start for start, end in local_ranges(layout, place))


def counts_here(layout: Layout, place: Place) -> bool:
    """Whether this place is the one, of those that hold the same part, whose part is counted."""
    copying = [axis for axis in CUTTING_AXES[layout.view] if axis not in layout.split_axes]
    return all(place.coordinate(axis) == 0 for axis in (*COPYING_AXES, *copying))


def whole_view(name: str, tensor: Tensor, layouts: Layouts, mesh: ViewedMesh) -> Tensor:
    """The whole of a parameter as a DTensor, over what this rank holds of it; nothing is copied.

    A DTensor in this sense: its shape and names are those of the plain model, its local tensor is
    that of `tensor`, and `full_tensor` gathers it over every axis that cuts it.

    Args:
        name: the parameter's, which says how it is cut.
        tensor: the parameter, sharded by the data axes or not, or anything of its shape.
        layouts: how parameters are cut.
        mesh: where.
    """
    layout = layouts.layout(name)
    local = local_tensor(tensor)
    if not layout.splits:
        return local
    assert tuple(local.shape) == local_shape(layout, mesh), (
        f"{name}: {tuple(local.shape)} here, {layout} says {local_shape(layout, mesh)}"
    )
    view = mesh.dense_view if layout.view == "dense" else mesh.expert_view
    assert view is not None, f"{name} is cut without a process group"
    # Described on meta: from_local would move to the device what is kept on the host.
    described = DTensor.from_local(
        torch.empty_like(local, device="meta"),
        view[CUTTING_AXES[layout.view]],
        placements(layout),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=torch.empty(layout.shape, device="meta").stride(),
    )
    # One of two private parts of torch here; see the test that names the versions.
    return DTensor(local.detach(), described._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def placements(layout: Layout) -> list[Placement]:
    """A layout in torch's terms, over the axes of `CUTTING_AXES`."""
    dims = dict(layout.splits)
    return [
        Shard(dims[axis]) if axis in dims else Replicate() for axis in CUTTING_AXES[layout.view]
    ]


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kept_tensor(parameter: nn.Parameter) -> Tensor:
    """The very tensor in which this rank keeps a sharded parameter, for marks that torch looks for.

    `to_local` gives another one, with the same memory. A private part of torch, as above.
    """
    assert isinstance(parameter, DTensor), "a parameter is shown whole, not as its shard"
    return parameter._local_tensor


def _part(indices: Range, place: Place, axis: str) -> Range:
    """This place's part of a range, as `torch.chunk` cuts it."""
    start, end = indices
    part = -(-(end - start) // place.degree(axis))
    first = start + part * place.coordinate(axis)
    return min(first, end), min(first + part, end)
