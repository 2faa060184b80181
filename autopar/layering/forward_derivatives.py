"""Gradients inside of a forward derivative, as in Hessian-vector products.

`jax.jvp(jax.grad(loss), ...)` returns a gradient and its derivative. JAX names both passes of the
gradient as a part of a differentiated function, `jvp(jvp(...))` and `jvp(transpose(jvp(...)))`. So
it names the gradients that a model takes in its forward pass, whose backward pass is outside. Where
a step has no backward pass outside, the gradients inside are its own.
"""

from operator import is_

from jax.extend.core import Jaxpr, JaxprEqn

from autopar.ir.graph import is_backward, is_outer_backward, without_elements


def without_forward_derivative(jaxpr: Jaxpr) -> Jaxpr:
    """Return a flat jaxpr whose gradients are named as if nothing differentiated them.

    Steps without gradients, or with one that nothing differentiates, stay as they are.
    """
    while not any(map(is_outer_backward, jaxpr.eqns)) and any(map(is_backward, jaxpr.eqns)):
        eqns = list(map(_inside, jaxpr.eqns))
        if all(map(is_, eqns, jaxpr.eqns)):
            break
        jaxpr = jaxpr.replace(eqns=eqns)
    return jaxpr


def _inside(eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation of a differentiated gradient without the name of the differentiation."""
    names = [element.name for element in eqn.source_info.name_stack.stack]
    return without_elements(eqn, ["jvp"]) if names.count("jvp") > 1 else eqn
