"""Layers in a `scan` of a step that takes its gradients with JAX's own functions.

After `jax.grad` the step has a forward scan, which stacks residuals, and a backward scan, which
slices them in reverse. The forward pass is clustered with the iterations of its scans as equations
of their own, as a loss is. The forward scans are then cut between layers. The cuts spread to the
residuals and so to the backward scans (`autopar.layering.stack_cutting`).

A `jax.checkpoint` around the forward scan makes the backward pass run it again. A pipeline would
run that recomputation through all stages. Each piece of it begins with the carry that the forward
pass has computed instead, if both scans provably compute the same carries.
"""

from collections.abc import Iterable

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import scan_p

from autopar.ir.equation_groups import has_backward, units
from autopar.ir.flatten import flatten
from autopar.ir.graph import Atom, is_backward, source_line, variables
from autopar.layering.equal_values import EqualValues, equal_carries, runs_again
from autopar.layering.gradient_layers import forward_pass
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_options import AutoLayerOption
from autopar.layering.layer_scopes import in_layer, num_layers
from autopar.layering.layered_functions import Assignments, assigned_layers
from autopar.layering.piece_writer import Carry, scan_operands
from autopar.layering.scan_layers import Iterations, seeds_of
from autopar.layering.stack_cutting import BackwardScans, cut_stacks
from autopar.primitives import record_of


def cut_gradient_scans(
    jaxpr: Jaxpr, option: AutoLayerOption, weights: Iterable[int], assignments: Assignments
) -> Jaxpr | None:
    """Return a differentiated step with its forward pass and scans divided into layers.

    Args:
        jaxpr: the traced step.
        option: how to divide it.
        weights: the numbers of the inputs that may be weights.
        assignments: the layers of steps divided so far. A step that is traced again, for another
            batch size, is divided in the same way.

    Returns:
        The step; None if its gradients were taken by `autopar.grad`, or no scan is cut.

    Raises:
        NoLayersError: There are too few heavy equations, their work is too uneven, or the backward
            pass recomputes a scan in a way that can't be cut.
    """
    if not _has_scan(jaxpr):
        return None
    whole = flatten(jaxpr, loops=False)
    if num_layers(whole):
        return None
    groups = units(enumerate(whole.eqns))
    forward = forward_pass(groups, _recomputed_values(whole))
    read = {var: None for unit in groups if has_backward(unit) for var in unit.reads}
    numbers = [unit.number for unit in forward]
    part = whole.replace(
        eqns=[whole.eqns[number] for number in numbers],
        outvars=list(read),
        debug_info=whole.debug_info.with_unknown_names(),
    )
    iterations = Iterations(part, [whole.invars[i] for i in weights])
    if not iterations.scans:
        return None
    layers, cuts = iterations.cuts(assigned_layers(iterations, option, assignments))
    scans = {numbers[position]: cut for position, cut in cuts.items()}
    layer_of_forward = dict(zip(numbers, layers, strict=True))
    cut = cut_stacks(
        whole,
        seeds_of(whole, scans),
        layers=[layer_of_forward.get(n, option.layer_num) for n in range(len(whole.eqns))],
        scans=scans,
        backward=BackwardScans(_carries(whole, scans), option.layer_num),
    )
    eqns = [
        _labelled(eqn, layer, option.layer_num)
        for eqn, layer in zip(cut.jaxpr.eqns, cut.layers, strict=True)
    ]
    return cut.jaxpr.replace(eqns=eqns)


def _recomputed_values(jaxpr: Jaxpr) -> set[Var]:
    """Return the values of the forward pass that the backward pass computes again."""
    values = EqualValues()
    scans: list[JaxprEqn] = []
    recomputed: set[Atom] = set()
    for eqn in jaxpr.eqns:
        values.add(eqn)
        if not is_backward(eqn):
            scans += [eqn] if eqn.primitive is scan_p else []
            continue
        recomputed.update(values.first(var) for var in eqn.outvars)
        for earlier in scans if eqn.primitive is scan_p else []:
            if runs_again(values, eqn, earlier):
                recomputed.update(earlier.outvars)
    return set(variables(recomputed))


def _has_scan(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, or a jaxpr that it calls, has a scan."""
    return any(
        eqn.primitive is scan_p
        or any(_has_scan(param) for param in eqn.params.values() if isinstance(param, Jaxpr))
        for eqn in jaxpr.eqns
    )


def _labelled(eqn: JaxprEqn, layer: int, count: int) -> JaxprEqn:
    """Return an equation in its layer of `count` if it is in the forward pass, or is a scan.

    The layers of other equations of the backward pass follow from what they read.
    """
    if 0 <= layer < count and not is_backward(eqn):
        return in_layer(eqn, layer)
    if count <= layer < 2 * count and is_backward(eqn) and eqn.primitive is scan_p:
        return in_layer(eqn, 2 * count - 1 - layer)
    return eqn


def _carries(jaxpr: Jaxpr, forward: Iterable[int]) -> dict[int, list[Carry]]:
    """Return how the pieces of each backward scan get their carries.

    Args:
        jaxpr: the step.
        forward: the numbers of the forward scans that are cut.

    Raises:
        NoLayersError: A forward scan runs again, but may have other carries.
    """
    values = EqualValues()
    carries: dict[int, list[Carry]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is scan_p and is_backward(eqn):
            consts, init, _ = scan_operands(eqn)
            additive = additive_carries(eqn.params["jaxpr"], len(consts), len(init))
            carries[number] = ["sum" if is_sum else "passed on" for is_sum in additive]
            for other in forward:
                if runs_again(values, eqn, jaxpr.eqns[other]):
                    carries[number] = _recomputed(values, eqn, jaxpr.eqns[other], other)
        values.add(eqn)
    return carries


def _recomputed(values: EqualValues, scan: JaxprEqn, forward: JaxprEqn, number: int) -> list[Carry]:
    positions = equal_carries(values, scan, forward)
    if positions is None:
        raise NoLayersError(
            f"the backward pass runs the scan at {source_line(forward)} again as a whole, so its"
            " iterations can't be layers; apply jax.checkpoint to the body of the scan instead"
        )
    return [(number, position) for position in positions]


def additive_carries(body: Jaxpr, num_consts: int, num_carries: int) -> list[bool]:
    """Return whether the body of a scan only adds to each carry, as to the gradient of a constant.

    Args:
        body: the body, whose inputs are constants, carries and slices.
        num_consts: the number of constants.
        num_carries: the number of carries.
    """
    additive = []
    for position in range(num_carries):
        before = body.invars[num_consts + position]
        after = body.outvars[position]
        readers = [eqn for eqn in body.eqns if before in eqn.invars]
        additive.append(
            len(readers) == 1
            and record_of(readers[0]).is_addition
            and list(readers[0].invars).count(before) == 1
            and readers[0].outvars[0] is after
            and body.outvars.count(before) == 0
            and body.outvars.count(after) == 1
            and not any(after in eqn.invars for eqn in body.eqns)
        )
    return additive
