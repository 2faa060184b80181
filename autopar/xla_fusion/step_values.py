"""The values of a step: the equations that write and read them, and the views that share memory."""

from collections import defaultdict

from jax.extend.core import Literal, Var
from jax.extend.core.primitives import broadcast_in_dim_p
from jax.lax import optimization_barrier_p

from autopar.ir import control_flow
from autopar.ir.graph import Atom, variables
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
