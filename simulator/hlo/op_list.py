"""From the computations of a module to the body that one device launches: the schedule, streams, loops and branches."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from simulator.hlo.kernels import kernel_of
from simulator.hlo.provenance import name_of, phase_of
from simulator.hlo.replica_groups import groups_of
from simulator.hlo.text import Computation, Instruction, Module, blamed, read_module
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
    "collective-broadcast": "all_gather",  # each device receives the array once, as in an all_gather of it
}

_FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier", "domain",
    "partition-id", "replica-id", "send-done", "recv-done",  # what is sent is counted where it is handed over
))  # fmt: skip

_FLOP_PER_BYTE = 50
"""What a GPU computes while it moves a byte, roughly; only compares the branches of a conditional."""


def parse_hlo(text: str) -> OpList:
    """The kernels, collectives and loops that one device launches to run the entry computation of scheduled HLO, in order.

    FLOP count matrix products and convolutions only (the rest is bound by memory); bytes are what each kernel reads and writes of
    device memory. Loops must have a known trip count; of a conditional the longest branch is taken. Kernels whose cost nobody
    knows say so. Raises `HloError` for what can't be read.
    """
    module = read_module(text)
    return tuple(_ops(module, module.entry))


def _ops(module: Module, computation: Computation) -> Iterator[Op]:
    waited: set[str] = set()  # collectives that were waited for where they started
    phase: TrainingPhase = ""
    for instruction in computation.instructions:
        name = name_of(instruction)
        if name is not None:  # copies that the compiler adds belong to the phase before them
            phase = phase_of(name)
        opcode, moment = _split_async(instruction.opcode)
        if instruction.opcode in _FREE or moment == "update":
            continue
        with blamed(instruction):
            if moment == "done":
                start = _start_of(computation, instruction)
                if start.name not in waited and _collective(module, computation, start):
                    yield Done(start.name)
            elif collective := _collective(module, computation, instruction):
                yield Start(collective)
                if moment != "start" or '"is_sync":true' in instruction.attributes:
                    waited.add(instruction.name)
                    yield Done(instruction.name)
            elif moment == "start" and "calls=" in instruction.attributes:
                # on another stream, but it needs the same cores: taken in order
                yield from _ops(module, module.called(instruction, "calls"))
            elif opcode == "while":
                yield Loop(
                    _trip_count(module, instruction),
                    tuple(_ops(module, module.called(instruction, "body"))),
                )
            elif opcode == "conditional":
                yield from max(
                    (tuple(_ops(module, branch)) for branch in branches(module, instruction)),
                    key=_length,
                )
            elif opcode == "call":
                yield from _ops(module, module.called(instruction, "to_apply"))
            else:
                yield replace(kernel_of(module, computation, instruction), phase=phase)


def _collective(
    module: Module, computation: Computation, instruction: Instruction
) -> Collective | None:
    """The collective that `instruction` does or starts; None for other work.

    It may be wrapped in a computation of its own, or fused with the slices that it reads or updates.
    """
    opcode, _ = _split_async(instruction.opcode)
    inner = instruction
    if opcode in ("async", "fusion"):
        computation = module.called(instruction, "calls")
        inner = next(
            (each for each in computation.instructions if each.opcode in _COLLECTIVES), inner
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
    """`all-reduce-start` is ("all-reduce", "start"); for an instruction that is not asynchronous the moment is empty."""
    base, _, moment = opcode.rpartition("-")
    return (base, moment) if base and moment in ("start", "update", "done") else (opcode, "")


def _start_of(computation: Computation, done: Instruction) -> Instruction:
    start = done
    while _split_async(start.opcode)[1] != "start":
        if not start.operands:
            raise done.error("waits for nothing; expected an operand that some ...-start computes")
        start = computation.operands(start)[0]
    return start


def branches(module: Module, conditional: Instruction) -> Iterator[Computation]:
    """The computations of which a conditional runs one."""
    key = "branch_computations"
    if found := re.search(rf"{key}=\{{([^}}]*)\}}", conditional.attributes):
        yield from (
            module.computation(conditional, key, name.strip().lstrip("%"))
            for name in found[1].split(",")
        )
    else:
        yield module.called(conditional, "true_computation")
        yield module.called(conditional, "false_computation")


def _length(body: OpList) -> float:
    work = work_of(body)
    return sum(work.flops.values()) / _FLOP_PER_BYTE + work.bytes + sum(work.collectives.values())


def _trip_count(module: Module, loop: Instruction) -> int:
    if found := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes):
        return int(found[1])
    # Otherwise `i < constant` of an integer that the loop carries, taken for a counter from 0 in steps of 1, as JAX's are.
    condition = module.called(loop, "condition")
    compared = condition.by_name[condition.root]
    sides = condition.operands(compared)
    if compared.opcode == "fusion":
        fused, given = module.called(compared, "calls"), sides
        compared = fused.by_name[fused.root]
        sides = [
            given[int(side.arguments)] if side.opcode == "parameter" else side
            for side in fused.operands(compared)
        ]
    if compared.opcode == "compare" and "direction=LT" in compared.attributes:
        counter, bound = sides
        if (
            counter.opcode == "get-tuple-element"
            and bound.opcode == "constant"
            and bound.array.dtype[0] in "su"
        ):
            return max(0, int(bound.arguments))
    raise loop.error(
        "a loop without a known trip count has no known duration; use jax.lax.scan or a fori_loop with fixed bounds"
    )
