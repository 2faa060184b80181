"""Alpa's figure 11: cross-mesh resharding by a signal, and without and with local all_gathers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

import autopar
from experiments.paper.figure_rows import by_series
from experiments.paper.paper_style import bar_figure
from experiments.paper.published_values import published_factor
from experiments.paper.study import Table
from experiments.paper.wide_resnet_steps import (
    SMOKE,
    WideResNetPlan,
    alpa_plans,
    convolution_flops,
    plan_wide_resnet,
)
from experiments.validation.pipeline_quality import p3, step_of
from simulator import Program, Recv, Send, simulate

SIGNAL, WITHOUT, WITH = "signal", "without all_gather", "with local all_gather"
ORDER = (SIGNAL, WITHOUT, WITH)


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the rate of each kind of resharding on a number of GPUs."""
    plan = SMOKE if smoke else alpa_plans()[int(part)]
    program = _program(plan)
    sent = {WITH: program, WITHOUT: _copied(program), SIGNAL: _signalled(program)}
    for series in ORDER:
        seconds = simulate(sent[series], p3(plan.gpus)).makespan
        yield {
            "group": plan.gpus,
            "series": series,
            "unit": "PFLOP/s",
            "ours": convolution_flops(plan.model) / seconds / 1e15,
            "seconds": seconds,
            "sent_gb": sum(send.num_bytes for send in _sends(sent[series])) / 1e9,
        }


def _program(plan: WideResNetPlan) -> Program:
    """Return the analytic program of Alpa's stages, with local all_gathers."""
    planned = plan_wide_resnet(plan, plan.stages)
    return autopar.compile_step(*step_of(plan.model), planned, p3(plan.gpus), fidelity="analytic")


def _changed(program: Program, bytes_of: Callable[[int, Send, int], int]) -> Program:
    """Return a program without all_gathers after transfers, whose sends have other bytes.

    Args:
        program: the program, whose transfers may be completed by all_gathers.
        bytes_of: returns the bytes of a send, from the number of its mesh, the send, and the
            devices that share what they receive.
    """
    copies = {
        (instruction.value, mesh): len(instruction.gather.groups[0])
        for mesh, row in enumerate(program.instructions)
        for instruction in row
        if isinstance(instruction, Recv) and instruction.gather is not None
    }

    def change(mesh: int, instruction: Any) -> Any:
        match instruction:
            case Send(value, to):
                shared = copies.get((value, to), 1)
                return replace(instruction, num_bytes=bytes_of(mesh, instruction, shared))
            case Recv():
                return replace(instruction, gather=None)
            case _:
                return instruction

    rows_of = tuple(
        tuple(change(mesh, instruction) for instruction in row)
        for mesh, row in enumerate(program.instructions)
    )
    return replace(program, instructions=rows_of)


def _copied(program: Program) -> Program:
    """Return the program in which each device is sent everything that it needs."""
    return _changed(program, lambda mesh, send, shared: send.num_bytes * shared)


def _signalled(program: Program) -> Program:
    """Return the program in which each transfer sends one byte to each device."""
    return _changed(program, lambda mesh, send, shared: len(program.meshes[send.to]))


def _sends(program: Program) -> Iterator[Send]:
    return (one for row in program.instructions for one in row if isinstance(one, Send))


def draw(table: Table) -> Figure:
    """Draw the rates by number of GPUs."""
    shown = table.sort_values("group", kind="stable")
    return bar_figure(shown, 1.8, 3, order=ORDER, ylabel="PFLOP/s", xlabel="GPUs")


def caption(table: Table) -> str:
    """Return the caption."""
    rates = by_series(table)
    gain = (rates[WITH] / rates[WITHOUT]).iloc[-1]
    sent = by_series(table, "sent_gb")
    more = (sent[WITHOUT] / sent[WITH]).iloc[-1]
    return (
        "Wide-ResNet in Alpa's stages when a mesh sends a byte for each device, everything that"
        " each device needs, or each byte once, with an all_gather among the receivers (after Zheng"
        " et al., figure 11, whose claims in words are checked). On the most GPUs the second sends"
        f" {more:.1f} times as many bytes as the third, which is {gain:.2f} times as fast"
        f" (published: {published_factor('local_all_gather'):.1f})."
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    rates = by_series(table)
    return {
        "alpa_all_gather_faster": bool((rates[WITH] >= 0.999 * rates[WITHOUT]).all()),
        "alpa_all_gather_twice": bool(
            (rates[WITH] / rates[WITHOUT]).iloc[-1] > 0.85 * published_factor("local_all_gather")
        ),
        "alpa_signal_bounds": bool((rates[SIGNAL] >= 0.999 * rates[WITH]).all()),
    }
