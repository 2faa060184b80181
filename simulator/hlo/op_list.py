"""Lower a scheduled HLO module to the op list that one device launches.

It follows the schedule through loops, branches and asynchronous collectives.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from simulator.hlo.kernels import kernel_of
from simulator.hlo.provenance import name_of, phase_of
from simulator.hlo.replica_groups import groups_of
from simulator.hlo.text import Computation, Instruction, Module, errors_about, read_module
from simulator.work import (
    Collective,
    CollectiveKind,
    Done,
    Loop,
    Op,
    OpList,
    Start,
    TrainingPhase,
    work_of,
)

_COLLECTIVES: Mapping[str, CollectiveKind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "all_gather",  # each device receives the array once
}

_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("add-dependency", "opt-barrier", "domain", "partition-id", "replica-id"),
        *("send-done", "recv-done"),  # the matching send and recv are priced
    )
)
"""Opcodes that launch no kernel."""

_FLOP_PER_BYTE = 50
"""Rough arithmetic intensity of a GPU, to compare the branches of a conditional."""


def parse_hlo(text: str, *, endless_once: bool = False) -> OpList:
    """Return the kernels, collectives and loops that a device launches for scheduled HLO, in order.

    FLOP are counted for matrix products, convolutions and fused attention; memory bounds all other
    kernels. Bytes are what each kernel reads and writes in device memory. A conditional counts as
    its longest branch. `Kernel.unmodelled` names kernels without a cost model.

    Args:
        text: the text of a module, as `compiled.as_text()` of JAX returns it.
        endless_once: whether a loop without a known trip count counts as one iteration.

    Raises:
        HloError: the text is no module, or has a loop without a known trip count.
    """
    module = read_module(text)
    return tuple(_ops(module, module.entry, endless_once))


def _ops(module: Module, computation: Computation, endless_once: bool) -> Iterator[Op]:
    """Yield the ops of a computation and of the computations that it calls."""
    synchronous: set[str] = set()  # collectives whose `Done` follows their `Start`
    phase: TrainingPhase = ""
    for instruction in computation.instructions:
        name = name_of(instruction)
        if name is not None:  # copies that the compiler adds belong to the phase before them
            phase = phase_of(name)
        opcode, suffix = _split_async(instruction.opcode)
        if instruction.opcode in _FREE or suffix == "update":
            continue
        with errors_about(instruction):
            if suffix == "done":
                start = _start_of(computation, instruction)
                if start.name not in synchronous and _collective(module, computation, start):
                    yield Done(start.name)
            elif collective := _collective(module, computation, instruction):
                yield Start(collective)
                if suffix != "start" or '"is_sync":true' in instruction.attributes:
                    synchronous.add(instruction.name)
                    yield Done(instruction.name)
            elif suffix == "start" and opcode != "fusion" and "calls=" in instruction.attributes:
                # it runs on another stream, but needs the same cores: in the order of the schedule
                yield from _ops(module, module.called(instruction, "calls"), endless_once)
            elif opcode == "while":
                yield Loop(
                    _trip_count(module, computation, instruction, endless_once),
                    tuple(_ops(module, module.called(instruction, "body"), endless_once)),
                )
            elif opcode == "conditional":
                yield from max(
                    (
                        tuple(_ops(module, branch, endless_once))
                        for branch in branches(module, instruction)
                    ),
                    key=_length,
                )
            elif opcode == "call":
                yield from _ops(module, module.called(instruction, "to_apply"), endless_once)
            else:
                yield replace(kernel_of(module, computation, instruction), phase=phase)


def _collective(
    module: Module, computation: Computation, instruction: Instruction
) -> Collective | None:
    """Return the collective that an instruction performs or starts; None for other work.

    It may be in a computation that the instruction calls, or fused with slices that it reads or
    updates.
    """
    opcode, _ = _split_async(instruction.opcode)
    inner = instruction
    if opcode in ("async", "fusion"):
        computation = module.called(instruction, "calls")
        inner = next(
            (called for called in computation.instructions if called.opcode in _COLLECTIVES), inner
        )
        opcode = inner.opcode
    if opcode not in _COLLECTIVES:
        return None
    groups = groups_of(inner, module.num_devices)
    operands = computation.operands(inner)
    if opcode == "ragged-all-to-all":
        operands = operands[:1]  # the others are its result buffer, offsets and sizes
    num_bytes = sum(operand.num_bytes for operand in operands)
    if opcode == "all-gather":
        num_bytes *= len(groups[0])
    return Collective(instruction.name, _COLLECTIVES[opcode], num_bytes, groups)


def _split_async(opcode: str) -> tuple[str, str]:
    """Split `all-reduce-start` into ("all-reduce", "start"); a synchronous opcode has no suffix."""
    base, _, suffix = opcode.rpartition("-")
    return (base, suffix) if base and suffix in ("start", "update", "done") else (opcode, "")


def _start_of(computation: Computation, done: Instruction) -> Instruction:
    """Return the `...-start` of a `...-done`."""
    start = done
    while _split_async(start.opcode)[1] != "start":
        if not start.operands:
            raise done.error("waits for nothing; expected an operand that some ...-start computes")
        start = computation.operands(start)[0]
    return start


def branches(module: Module, conditional: Instruction) -> Iterator[Computation]:
    """Yield the computations of the branches of a conditional.

    Raises:
        HloError: the conditional names no computations above it.
    """
    key = "branch_computations"
    if listed := re.search(rf"{key}=\{{([^}}]*)\}}", conditional.attributes):
        yield from (
            module.computation(conditional, key, name.strip().lstrip("%"))
            for name in listed[1].split(",")
        )
    else:
        yield module.called(conditional, "true_computation")
        yield module.called(conditional, "false_computation")


def _length(ops: OpList) -> float:
    """Return how long an op list takes, in arbitrary units."""
    work = work_of(ops)
    return sum(work.flops.values()) / _FLOP_PER_BYTE + work.bytes + sum(work.collectives.values())


def _trip_count(
    module: Module, computation: Computation, loop: Instruction, endless_once: bool
) -> int:
    """Return the iterations of a loop, as XLA annotates them or as its counter implies them.

    Args:
        module: the module.
        computation: the computation with the loop.
        loop: the loop.
        endless_once: whether to return one for a loop without a known trip count.

    Raises:
        HloError: the trip count is not known.
    """
    if known := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes):
        return int(known[1])
    counted = _counted_iterations(module, computation, loop)
    if counted is not None:
        return counted
    if endless_once:
        return 1
    raise loop.error(
        "a loop without a known trip count has no known duration; use jax.lax.scan or a fori_loop "
        "with fixed bounds"
    )


def _counted_iterations(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Return the iterations of a loop `while i < bound`, whose start, step and bound are constants.

    None if the loop is of another form.
    """
    condition = module.called(loop, "condition")
    compared = condition.by_name[condition.root]
    scope = _Scope(module, condition)
    if compared.opcode == "fusion":
        scope, compared = scope.inside(compared)
    if compared.opcode != "compare" or "direction=LT" not in compared.attributes:
        return None
    counter, bound = (scope.count(side) for side in scope.operands(compared, least=2))
    if counter is None or counter.element is None or bound is None or bound.element is not None:
        return None
    body = module.called(loop, "body")
    following = _Scope(module, body).count(body.by_name[body.root], counter.element)
    (carried,) = computation.operands(loop, least=1)
    first = _Scope(module, computation).count(carried, counter.element)
    if following is None or following.element != counter.element or following.added <= 0:
        return None
    if first is None or first.element is not None:
        return None
    return max(0, -(-(bound.added - counter.added - first.added) // following.added))


@dataclass(frozen=True, slots=True)
class _Count:
    """An integer that is a constant, or a constant more than one that a loop carries.

    Attributes:
        element: number of the carried value; None for a constant.
        added: the constant.
    """

    element: int | None
    added: int


@dataclass(frozen=True, slots=True)
class _Scope:
    """A computation, to follow its integers.

    Attributes:
        module: the module.
        computation: the computation.
        caller: the fusion that has the computation, in its scope; None for a computation of a loop,
            whose parameter is the tuple of the carried values.
    """

    module: Module
    computation: Computation
    caller: "tuple[_Scope, Instruction] | None" = None

    def operands(self, instruction: Instruction, least: int = 0) -> tuple[Instruction, ...]:
        """Return the operands of an instruction of the computation."""
        return self.computation.operands(instruction, least)

    def inside(self, fusion: Instruction) -> "tuple[_Scope, Instruction]":
        """Return the computation of a fusion, and its result."""
        fused = self.module.called(fusion, "calls")
        return _Scope(self.module, fused, (self, fusion)), fused.by_name[fused.root]

    def count(self, instruction: Instruction, index: int | None = None) -> _Count | None:
        """Return the integer that an instruction computes; None if it is not known.

        Args:
            instruction: the instruction.
            index: the number of the integer in the result, if that is a tuple.
        """
        match instruction.opcode:
            case "constant" if instruction.array.dtype[0] in "su" and not instruction.array.dims:
                return _Count(None, int(instruction.arguments))
            case "parameter" if self.caller:
                scope, fusion = self.caller
                return scope.count(scope.operands(fusion)[int(instruction.arguments)], index)
            case "parameter":
                return None if index is None else _Count(index, 0)
            case "get-tuple-element":
                element = re.search(r"\bindex=(\d+)", instruction.attributes)
                (source,) = self.operands(instruction, least=1)
                return self.count(source, int(element[1])) if element else None
            case "tuple" if index is not None:
                return self.count(self.operands(instruction)[index])
            case "copy" | "bitcast" | "opt-barrier":
                return self.count(self.operands(instruction, least=1)[0], index)
            case "fusion":
                scope, result = self.inside(instruction)
                return scope.count(result, index)
            case "add":
                left, right = self.operands(instruction, least=2)
                return _sum(self.count(left), self.count(right))
            case _:
                return None


def _sum(left: _Count | None, right: _Count | None) -> _Count | None:
    """Return the sum of two integers; None if it is not known."""
    if left is None or right is None or None not in (left.element, right.element):
        return None
    element = right.element if left.element is None else left.element
    return _Count(element, left.added + right.added)
