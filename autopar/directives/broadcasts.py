"""Looking through broadcasts: dims of size one, reshapes that only move them, and no-op casts."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from autopar.directives.model_graph import ModelGraph, Node
from autopar.ir.graph import Atom, aval_of


@dataclass(frozen=True, slots=True)
class BroadcastView:
    """A value as a broadcast of another one.

    Attributes:
        source: the value before all broadcasts.
        dims: for each dim of the value the dim of `source`, or None where it is repeated.
        nodes: the broadcasting nodes, from the value to its source.
    """

    source: Atom
    dims: tuple[int | None, ...]
    nodes: tuple[Node, ...]

    @property
    def numpy_like(self) -> bool:
        """Whether NumPy's rules broadcast the source to the value without an explicit broadcast."""
        rank = aval_of(self.source).ndim - len(self.dims)
        return all(source is None or source - dim == rank for dim, source in enumerate(self.dims))

    def order(self, atom: Atom, frame: Sequence[int]) -> tuple[int | None, ...]:
        """Return the dim of the source for each dim of `frame`, without dims of size one.

        Args:
            atom: the value that this is a view of.
            frame: the shape to which the reader broadcasts `atom`.
        """
        nontrivial = [dim for dim, size in enumerate(aval_of(self.source).shape) if size != 1]
        own = [nontrivial.index(dim) if dim in nontrivial else None for dim in self.dims]
        if len(own) != len(frame):
            return tuple(own)
        pairs = zip(own, aval_of(atom).shape, frame, strict=True)
        return tuple(dim if size != 1 else None for dim, size, full in pairs if full != 1)


def look_through_broadcasts(graph: ModelGraph, atom: Atom) -> BroadcastView:
    """Return `atom` as a broadcast of the first value behind it that is computed."""
    dims: tuple[int | None, ...] = tuple(range(aval_of(atom).ndim))
    nodes: list[Node] = []
    while isinstance(atom, Var) and atom in graph.producer:
        inner = source_dims(graph.producer[atom].eqn)
        if inner is None:
            break
        nodes.append(graph.producer[atom])
        dims = tuple(None if dim is None else inner[dim] for dim in dims)
        atom = nodes[-1].eqn.invars[0]
    return BroadcastView(atom, dims, tuple(nodes))


def source_dims(eqn: JaxprEqn) -> list[int | None] | None:
    """Return the operand's dim for each dim of the result, or None if `eqn` computes something.

    A dim that the equation repeats or inserts has no dim of the operand.
    """
    if len(eqn.invars) != 1:
        return None
    source = aval_of(eqn.invars[0])
    result = aval_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "copy":
            return list(range(result.ndim))
        case "convert_element_type" if source.dtype == result.dtype:
            return list(range(result.ndim))
        case "broadcast_in_dim":
            sources = {
                dim: k
                for k, dim in enumerate(eqn.params["broadcast_dimensions"])
                if source.shape[k] == result.shape[dim]
            }
            return [sources.get(dim) for dim in range(result.ndim)]
        case "reshape" | "squeeze" | "expand_dims":
            left = [dim for dim, size in enumerate(source.shape) if size != 1]
            right = [dim for dim, size in enumerate(result.shape) if size != 1]
            if [source.shape[dim] for dim in left] != [result.shape[dim] for dim in right]:
                return None
            sources = dict(zip(right, left, strict=True))
            return [sources.get(dim) for dim in range(result.ndim)]
    return None


def nontrivial_sizes(atom: Atom) -> list[int]:
    """Return the shape of `atom` without dims of size one."""
    return [size for size in aval_of(atom).shape if size != 1]
