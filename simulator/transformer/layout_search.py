"""Search of layouts: the fastest degrees of parallelism, microbatch and recomputation that fit.

A layout is an `Execution` on all devices of a cluster. Memory is much cheaper to compute than time,
so that layouts without a chance to fit are not timed.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from simulator.engine.prediction import Prediction
from simulator.files import one_line
from simulator.hardware.description import ClusterError
from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution, Recompute
from simulator.transformer.step import footprint, predict
from simulator.transformer.transformer_sizes import Transformer

SEARCHED = ("tensor", "context", "pipeline", "interleave", "expert", "microbatch", "recompute")
"""Fields of an execution that a search chooses. The data axis has the remaining devices."""

_LARGEST_MICROBATCH = 16
_LEAST_PROBABILITY = 0.05
"""Layouts that fit with less are not timed."""

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that was timed.

    Attributes:
        execution: how the step is divided over devices.
        prediction: the prediction of the step.
    """

    execution: Execution
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """The layouts of a search.

    Attributes:
        fitting: layouts that fit with the asked probability, the fastest first.
        uncertain: layouts that may fit, but with less probability, likewise.
        oversized: number of layouts that are too large.
        least_bytes: least memory of a layout, reserve included; None if there is no layout.
    """

    fitting: tuple[Layout, ...]
    uncertain: tuple[Layout, ...]
    oversized: int
    least_bytes: float

    @property
    def count(self) -> int:
        """Number of layouts that were looked at."""
        return len(self.fitting) + len(self.uncertain) + self.oversized

    @property
    def frontier(self) -> tuple[Layout, ...]:
        """Layouts that fit and have less memory than all faster ones, the fastest first."""
        best: list[Layout] = []
        for layout in self.fitting:
            if not best or _reserved(layout) < _reserved(best[-1]):
                best.append(layout)
        return tuple(best)


def search_layouts(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    confidence: float = 0.95,
    kept: Collection[str] = (),
) -> LayoutSearch:
    """Return the layouts of a step on all devices of a cluster, the fastest first.

    Degrees are divisors of the number of devices; tensor parallelism stays within a host, with
    sequence parallelism. Experts are whole on a device unless `execution.expert_tensor` divides
    them. Of each layout that fits, recomputation is the least with which it does, as more of it is
    only slower.

    Args:
        model: the model that is trained.
        execution: values of the fields that are not searched, such as `global_batch` and `zero`.
        machine: the cluster and the software that drives it.
        confidence: probability with which a layout has to fit, between 0 and 1.
        kept: fields of `SEARCHED` that have their value in `execution`.

    Raises:
        ClusterError: no layout divides the model, the batch and the devices, or the device lacks
            products of the model's precision.
        ValueError: `confidence` is not between 0 and 1, or `kept` has other fields.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: given {confidence}, expected between 0 and 1, both excluded")
    unknown = [name for name in kept if name not in SEARCHED]
    if unknown:
        raise ValueError(f"given {unknown[0]!r} to keep, expected some of {', '.join(SEARCHED)}")
    machine.linear_products(model.precision)  # raises for a device without them
    space = _Space(model, execution, machine, frozenset(kept))
    attempts = _Attempts(model, machine, confidence, tuple(space.recomputations()))
    for axes in space.axes():
        for microbatch in space.microbatches(axes["data"]):
            # each device of a pipeline has least activations without interleaving, and a larger
            # microbatch has no less of them
            interleaves = iter(space.interleaves(axes, microbatch))
            fields = {**axes, "microbatch": microbatch}
            if attempts.is_oversized({**fields, "interleave": next(interleaves)}):
                break
            for interleave in interleaves:
                attempts.is_oversized({**fields, "interleave": interleave})
    if attempts.least_bytes is None:
        raise ClusterError(space.explanation(attempts.reason))
    return LayoutSearch(
        _by_time(attempts.fitting),
        _by_time(attempts.uncertain),
        attempts.oversized,
        attempts.least_bytes,
    )


def _by_time(layouts: list[Layout]) -> tuple[Layout, ...]:
    return tuple(sorted(layouts, key=lambda layout: layout.prediction.seconds))


def _reserved(layout: Layout) -> float:
    return layout.prediction.memory.reserved


@dataclass(slots=True)
class _Attempts:
    """The layouts that a search has looked at.

    Attributes:
        model: the model.
        machine: the machine.
        confidence: probability with which a layout has to fit.
        recomputations: what may be recomputed, the least first.
        fitting: layouts that fit.
        uncertain: layouts that may fit.
        oversized: number of layouts that are too large.
        least_bytes: least memory of a layout; None without a layout.
        reason: why a layout is not possible; empty if all are.
    """

    model: Transformer
    machine: Machine
    confidence: float
    recomputations: tuple[Recompute, ...]
    fitting: list[Layout] = field(default_factory=list)
    uncertain: list[Layout] = field(default_factory=list)
    oversized: int = 0
    least_bytes: float | None = None
    reason: str = ""

    def is_oversized(self, fields: Fields) -> bool:
        """Add a layout with the least recomputation that fits, and return whether none does.

        Args:
            fields: fields of the execution but for recomputation.
        """
        has_chance = False
        for recompute in self.recomputations:
            try:
                execution = Execution.model_validate({**fields, "recompute": recompute})
                memory = footprint(self.model, execution, self.machine)
            except ValueError as error:
                self.reason = one_line(error)
                return False
            if self.least_bytes is None or memory.reserved < self.least_bytes:
                self.least_bytes = memory.reserved
            if memory.fit_probability < min(_LEAST_PROBABILITY, self.confidence):
                self.oversized += 1
                continue
            has_chance = True
            layout = Layout(execution, predict(self.model, execution, self.machine, memory))
            if memory.fit_probability >= self.confidence:
                self.fitting.append(layout)
                break
            self.uncertain.append(layout)
        return not has_chance


@dataclass(frozen=True, slots=True)
class _Space:
    """The layouts that a search looks at.

    Attributes:
        model: the model.
        execution: values of the fields that are not searched.
        machine: the machine.
        kept: names of searched fields that have their value in `execution`.
    """

    model: Transformer
    execution: Execution
    machine: Machine
    kept: frozenset[str]

    def axes(self) -> Iterator[Fields]:
        """Yield the fields of all layouts but for microbatch, interleaving and recomputation."""
        base = self.execution.fields() | {"stage_layers": None}
        if {"pipeline", "interleave"} <= self.kept:
            base["stage_layers"] = self.execution.stage_layers
        if "recompute" not in self.kept:
            base["saved"] = ()
        for degrees in self._degrees():
            for experts in self._experts(degrees["pipeline"]):
                yield {**base, **degrees, **experts}

    def microbatches(self, data: int) -> Iterator[int]:
        """Yield the sequences of a microbatch; none if the batch isn't a multiple of `data`."""
        if self.execution.global_batch % data:
            return
        sequences = self.execution.global_batch // data
        for size in self._values("microbatch", _divisors(sequences, _LARGEST_MICROBATCH)):
            if sequences % size == 0:
                yield size

    def interleaves(self, axes: Fields, microbatch: int) -> Iterable[int]:
        """Return the numbers of stages of a device, which divide its layers."""
        layers, pipeline = self.model.layers, axes["pipeline"]
        microbatches = self.execution.global_batch // (axes["data"] * microbatch)
        divided = pipeline > 1 and layers % pipeline == 0 and microbatches % pipeline == 0
        return self._values("interleave", _divisors(layers // pipeline) if divided else (1,))

    def recomputations(self) -> Iterator[Recompute]:
        """Yield what may be recomputed, the least first."""
        if "recompute" in self.kept:
            yield self.execution.recompute
            return
        yield "none"
        if self.model.attention == "naive":  # otherwise there are no scores to recompute
            yield "selective"
        yield "mlp"
        yield "full"

    def explanation(self, reason: str) -> str:
        """Return why there is no layout.

        Args:
            reason: why a layout of these axes is not possible; empty if there is none.
        """
        kept = ", ".join(f"{name} {getattr(self.execution, name)}" for name in sorted(self.kept))
        return (
            f"no layout of {self._devices} devices{f' with {kept}' if kept else ''}: "
            + (reason or self._indivisible())
            + "; choose another number of hosts or another global_batch"
            + (", or keep fewer fields" if kept else "")
        )

    @property
    def _devices(self) -> int:
        return self.machine.cluster.num_devices

    def _indivisible(self) -> str:
        experts = self.model.experts
        return (
            "tensor has to divide heads and the devices of a host, context seq, "
            + (f"expert {experts.count} experts and the devices of a stage, " if experts else "")
            + f"and the remaining devices global_batch, which is {self.execution.global_batch}"
        )

    def _degrees(self) -> Iterator[Fields]:
        """Yield the degrees of all axes, and sequence parallelism."""
        model = self.model
        within_host = self.machine.cluster.devices_per_host
        for tensor in self._values("tensor", _divisors(within_host)):
            if model.heads % tensor or model.hidden % tensor:
                continue
            for pipeline in self._values("pipeline", _divisors(self._devices, model.layers)):
                if pipeline > 1 and self.execution.zero == 3 and "pipeline" not in self.kept:
                    continue
                rest = self._devices // (tensor * pipeline)
                for context in self._values("context", _divisors(rest, model.seq)):
                    group = tensor * pipeline * context
                    if self._devices % group == 0:
                        yield {
                            "tensor": tensor,
                            "sequence_parallel": tensor > 1,
                            "context": context,
                            "pipeline": pipeline,
                            "data": self._devices // group,
                        }

    def _experts(self, pipeline: int) -> Iterator[Fields]:
        """Yield the degrees of experts, which are folded into the devices of a stage."""
        experts = self.model.experts
        if experts is None:
            yield {"expert": 1, "expert_tensor": None}
            return
        group = self._devices // pipeline
        for expert in self._values("expert", _divisors(experts.count, group)):
            shards = self.execution.expert_tensor or 1
            if group % (expert * shards) == 0:
                yield {"expert": expert, "expert_tensor": shards}

    def _values(self, name: str, searched: Iterable[int]) -> Iterable[int]:
        return (getattr(self.execution, name),) if name in self.kept else searched


def _divisors(number: int, largest: int | None = None) -> list[int]:
    """Return the divisors of a number up to `largest`."""
    limit = number if largest is None else min(number, largest)
    return [divisor for divisor in range(1, limit + 1) if number % divisor == 0]
