"""Values of a step with their writers and readers, and epilogues: additions to a product."""

from collections import defaultdict

from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import broadcast_in_dim_p, scatter_add_p
from jax.lax import optimization_barrier_p

from autopar.ir import control_flow
from autopar.ir.graph import Atom, aval_of, variables
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.xla_fusion.views import is_view


class Values:
    """The values of a step.

    Attributes:
        makers: number of the equation that computes each value.
        readers: numbers of the equations that read each value.
        base: for each view, the value whose memory it shares.
        inputs: inputs and constants of the step.
        outputs: outputs of the step, and values that other tasks of its stage read.
    """

    def __init__(self, step: StepGraph) -> None:
        self.eqns = step.jaxpr.eqns
        self.makers = {var: number for number, eqn in enumerate(self.eqns) for var in eqn.outvars}
        self.readers: dict[Var, list[int]] = defaultdict(list)
        for number, eqn in enumerate(self.eqns):
            for var in dict.fromkeys(variables(eqn.invars)):
                self.readers[var].append(number)
        self.base = self._bases()
        self.inputs = {*step.jaxpr.invars, *step.jaxpr.constvars}
        returned = variables(step.jaxpr.outvars)
        self.outputs = {self.base.get(var, var) for var in (*returned, *step.cross_task_values)}

    def _bases(self) -> dict[Var, Var]:
        """Return the value whose memory each view shares."""
        base: dict[Var, Var] = {}
        for eqn in self.eqns:
            if is_view(eqn) and eqn.primitive is not optimization_barrier_p:
                for atom, var in zip(eqn.invars, eqn.outvars, strict=False):
                    if isinstance(atom, Var):
                        base[var] = base.get(atom, atom)
        return base

    def shown(self, atom: Atom) -> Var | None:
        """Return the value in memory that an operand is or views; None for literals."""
        return None if isinstance(atom, Literal) else self.base.get(atom, atom)

    def only_reader(self, var: Var) -> int | None:
        """Return the only equation that reads a value or its views; None if there are others.

        An output of the step is read by others.
        """
        while True:
            readers = self.readers[var]
            if len(readers) != 1 or self.base.get(var, var) in self.outputs:
                return None
            eqn = self.eqns[readers[0]]
            if not is_view(eqn) or eqn.primitive in control_flow.MARKERS:
                return readers[0]
            var = eqn.outvars[next(i for i, atom in enumerate(eqn.invars) if atom is var)]

    def unspread(self, var: Var) -> Var:
        """Return the value that `var` broadcasts; `var` itself if it is no broadcast."""
        eqn = self.eqns[self.makers[var]] if var in self.makers else None
        if (
            eqn is not None
            and eqn.primitive is broadcast_in_dim_p
            and isinstance(eqn.invars[0], Var)
        ):
            return eqn.invars[0]
        return var

    def only_adds(self, var: Var) -> bool:
        """Return whether the only reader of `var` adds it to another value."""
        reader = self.only_reader(var)
        return reader is not None and record_of(self.eqns[reader]).is_addition

    def is_constant(self, atom: Atom) -> bool:
        """Return whether all elements are the same literal."""
        maker = self.makers.get(atom) if isinstance(atom, Var) else None
        if maker is None:
            return isinstance(atom, Literal)
        eqn = self.eqns[maker]
        return eqn.primitive is broadcast_in_dim_p and isinstance(eqn.invars[0], Literal)


@memoized_on_step
def epilogues(step: StepGraph) -> dict[int, int]:
    """Return for each equation that is the epilogue of a product the number of the product."""
    return find_epilogues(Values(step))


def find_epilogues(values: Values) -> dict[int, int]:
    """Return for each epilogue the number of its product.

    A product adds a bias first, and then an array of the size of its result.
    """
    epilogues: dict[int, int] = {}
    for number, eqn in enumerate(values.eqns):
        if record_of(eqn).fusion != "contraction":
            continue
        result = eqn.outvars[0]
        biased = False
        while (reader := values.only_reader(result)) is not None and reader not in epilogues:
            other = _added(values, values.eqns[reader], result)
            if other is None:
                break
            source = values.unspread(other)
            if values.makers.get(values.base.get(source, source), -1) > number:
                break
            is_bias = aval_of(source).size <= max(aval_of(result).shape, default=1)
            is_whole = not is_bias and aval_of(other).size == aval_of(result).size
            if not is_whole and (biased or not is_bias):
                break
            epilogues[reader] = number
            if is_whole:
                break
            biased = True
            result = values.eqns[reader].outvars[0]
    return epilogues


def find_scattered(values: Values) -> set[Var]:
    """Return results of scatters that are only added to another value.

    XLA scatters onto that value in place.
    """
    scatters = (eqn.outvars[0] for eqn in values.eqns if eqn.primitive is scatter_add_p)
    return {var for var in scatters if values.only_adds(var)}


def _added(values: Values, eqn: JaxprEqn, result: Var) -> Var | None:
    """Return the other operand if `eqn` adds an array of the same dtype to `result`."""
    if not record_of(eqn).is_addition:
        return None
    others = [atom for atom in eqn.invars if values.shown(atom) is not values.shown(result)]
    if (
        len(others) != 1
        or isinstance(others[0], Literal)
        or aval_of(others[0]).dtype != aval_of(result).dtype
    ):
        return None
    return others[0] if aval_of(eqn.outvars[0]).size == aval_of(result).size else None
