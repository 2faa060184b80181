"""See through broadcasts, dims of size one and casts to the same type."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from autopar.directives.model_graph import ModelGraph, Node
from autopar.ir.graph import Atom, aval_of


@dataclass(frozen=True, slots=True)
class BroadcastView:
    """What an atom is, looked through broadcasts: the source, for each dim the source's (None: repeated), and the nodes between."""

    source: Atom
    dims: tuple[int | None, ...]
    nodes: tuple[Node, ...]

    @property
    def numpy_like(self) -> bool:
        """Whether the source broadcasts by itself, by NumPy's rules."""
        rank = aval_of(self.source).ndim - len(self.dims)
        return all(source is None or source - dim == rank for dim, source in enumerate(self.dims))

    def order(self, atom: Atom, frame: Sequence[int]) -> tuple[int | None, ...]:
        """Which dim of the source each dim of `frame` is, the shape that `atom` is broadcast to; dims of size one don't count."""
        kept = [dim for dim, size in enumerate(aval_of(self.source).shape) if size != 1]
        own = [kept.index(dim) if dim in kept else None for dim in self.dims]
        if len(own) != len(frame):
            return tuple(own)
        pairs = zip(own, aval_of(atom).shape, frame, strict=True)
        return tuple(dim if size != 1 else None for dim, size, full in pairs if full != 1)


def look_through(graph: ModelGraph, atom: Atom) -> BroadcastView:
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
    """For each dim of the result the operand's that it is; None for equations that compute something."""
    if len(eqn.invars) != 1:
        return None
    source, result = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "copy":
            return list(range(result.ndim))
        case "convert_element_type" if source.dtype == result.dtype:
            return list(range(result.ndim))
        case "broadcast_in_dim":
            at = {
                d: k
                for k, d in enumerate(eqn.params["broadcast_dimensions"])
                if source.shape[k] == result.shape[d]
            }
            return [at.get(dim) for dim in range(result.ndim)]
        case "reshape" | "squeeze" | "expand_dims":
            left = [dim for dim, size in enumerate(source.shape) if size != 1]
            right = [dim for dim, size in enumerate(result.shape) if size != 1]
            if [source.shape[dim] for dim in left] != [result.shape[dim] for dim in right]:
                return None
            at = dict(zip(right, left, strict=True))
            return [at.get(dim) for dim in range(result.ndim)]
    return None


def sizes(atom: Atom) -> list[int]:
    """The shape, without dims of size one."""
    return [size for size in aval_of(atom).shape if size != 1]
