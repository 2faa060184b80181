"""`fit`: the largest batch, sequence or number of layers that fits, or the smallest cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, get_args

from autopar.capacity.budgeted_step import BudgetedStep, checked_cluster
from autopar.capacity.fit_result import Fewest, Fit, Largest
from autopar.capacity.memory_savings import budget_of_method
from autopar.capacity.size_attempts import SizeAttempts, settled
from autopar.capacity.sized_steps import MadeStep, check_takes, made_step
from autopar.checks import FLAG, NONE, OptionError, checked, integer, one_of, short_repr
from autopar.devices import requested_mesh
from autopar.methods import PLANNING_METHOD, PlanningMethod
from autopar.plan import Plan
from autopar.planning.method_planning import any_cluster
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster

_MULTIPLE_OF = {"sequence": 128, "layers": 1}
"""Default multiples; the multiple of the batch depends on the devices and microbatches."""

_MEANING: dict[Largest, str] = {
    "batch": "number of examples in the batch",
    "sequence": "sequence length",
    "layers": "number of layers",
}

_AT_MOST = {"batch": 2**20, "sequence": 2**20, "layers": 2**12, "hosts": 2**10, "gpus": 2**13}
"""Default upper limits of the sizes."""


def fit(
    make_step: Callable[..., Any],
    cluster: AnyCluster | str | Path,
    *,
    largest: Largest | None = None,
    fewest: Fewest | None = None,
    method: PlanningMethod | None = None,
    memory_budget: float | None = None,
    multiple_of: int | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
    confirm: bool = True,
) -> Fit:
    """Return the largest size of a step that fits into memory, or the smallest cluster for it.

    Sizes are searched by doubling and bisection, each planned within the budget. Clusters are first
    searched among those whose numbers of hosts, or of GPUs of a host, are 1, 2, 3, 4, 6, 8, 12 and
    so on: most batches divide evenly over them. XLA compiles the answer, and the next size if the
    planner finds it close to the budget. A plan that needs more than the planner estimates is
    planned again within less.

    The answer fits, and the next size does not. Sizes farther away are not tried: as plans change
    with the size, one of them may fit again.

    Args:
        make_step: with `largest`, a function of the size: the number of examples in the batch, the
            sequence length, or the number of layers. With `fewest`, a function without arguments.
            It returns (step, args) or (step, args, options), as for `autopar plan`; shapes suffice
            as arguments.
        cluster: the cluster, its name or the path of its file. With `fewest`, the kind of hosts.
        largest: what varies: "batch", "sequence" or "layers".
        fewest: "hosts", or "gpus": a part of one host or whole hosts. Give this or `largest`.
        method: how to parallelize. By default that of the options that `make_step` returns, else
            the fastest pipeline or sharding, as `autopar plan --method auto`.
        memory_budget: bytes of one device that the compiled step may use. By default those of the
            method, or the device's memory less its reserve.
        multiple_of: sizes are multiples of this number. By default devices x microbatches for the
            batch, 128 for the sequence, and 1 for others.
        at_least: the smallest size to consider; by default `multiple_of`.
        at_most: the largest size to consider.
        confirm: whether XLA compiles the answer. Otherwise the planner's estimate decides.

    Returns:
        The answer with its plan, its prediction, and the next size with what would make it fit.

    Raises:
        NeverFitsError: no size fits. The error says what would make the first one fit.
        OptionError: an option or the result of `make_step` is not allowed, both or neither of
            `largest` and `fewest` are given, or the size changes no shape.
        ClusterError: the cluster has pools of different hosts.
        ValueError: a size has no plan for another reason, which is its cause.

    Example:
        >>> def make_step(batch_size):
        ...     return train_step, (state, jax.ShapeDtypeStruct((batch_size, 1024), jnp.int32))
        >>> print(autopar.fit(make_step, "dgx_h100", largest="batch"))
    """
    _check_quantity(largest, fewest)
    number = integer() | NONE
    limits = _Limits(
        checked("multiple_of", multiple_of, number),
        checked("at_least", at_least, number),
        checked("at_most", at_most, number),
    )
    confirm = checked("confirm", confirm, FLAG)
    maker = _Maker(
        make_step,
        checked_cluster(any_cluster(cluster), "fit"),
        checked("method", method, NONE | PLANNING_METHOD),
        memory_budget,
    )
    if largest is not None:
        check_takes(make_step, (1,))
        attempts = _attempts_of_sizes(largest, maker, limits)
        start, towards, back = attempts.first_guess(), len(attempts.sizes) - 1, 0
    else:
        assert fewest is not None
        check_takes(make_step, ())
        attempts = _attempts_of_clusters(fewest, maker, limits)
        start, towards, back = 0, 0, len(attempts.sizes) - 1
    answer = settled(attempts.fits, start, towards, back, attempts.rungs)
    if confirm:
        if answer is not None:
            attempts.learn_excess(answer[0])
            answer = settled(attempts.fits, answer[0], towards, back, attempts.rungs)
        start = back if answer is None else answer[0]
        answer = settled(attempts.fits_compiled, start, towards, back, attempts.rungs)
    if answer is None:
        raise attempts.never_fits(back)
    return _result(attempts, *answer, is_confirmed=confirm)


def _check_quantity(largest: Largest | None, fewest: Fewest | None) -> None:
    """Raise OptionError unless one of `largest` and `fewest` is given, with a value it allows."""
    if (largest is None) == (fewest is None):
        given = "both" if largest is not None else "neither"
        raise OptionError(
            f"{given} of largest and fewest are given; expected one: largest="
            f"{', '.join(map(repr, get_args(Largest)))} or fewest="
            f"{', '.join(map(repr, get_args(Fewest)))}"
        )
    checked("largest", largest, one_of(*get_args(Largest)) | NONE)
    checked("fewest", fewest, one_of(*get_args(Fewest)) | NONE)


@dataclass(frozen=True)
class _Limits:
    """The sizes that are allowed; None for the default."""

    multiple_of: int | None
    at_least: int | None
    at_most: int | None

    def sizes(self, quantity: str, multiple_of: int) -> range:
        """Return the sizes in rising order.

        Args:
            quantity: what varies.
            multiple_of: the default of the multiple.

        Raises:
            OptionError: there are none.
        """
        multiple = self.multiple_of or multiple_of
        least = multiple * ceil((self.at_least or 1) / multiple)
        most = self.at_most or max(_AT_MOST[quantity], least)
        if least > most:
            raise OptionError(
                f"at_least={self.at_least} and at_most={self.at_most} leave no multiple of"
                f" {multiple} (multiple_of); expected limits with one between them"
            )
        return range(least, most + 1, multiple)


@dataclass(frozen=True)
class _Maker:
    """Makes steps within a budget; see `fit` for the attributes."""

    make_step: Callable[..., Any]
    cluster: Cluster
    method: PlanningMethod | None
    memory_budget: float | None

    def method_of(self, made: MadeStep) -> PlanningMethod | None:
        """Return the method that was given, or that comes with a step."""
        return self.method or made.options.get("method")

    def step(self, made: MadeStep, cluster: Cluster) -> BudgetedStep:
        """Return a step to plan on a cluster."""
        method = self.method_of(made)
        usable = cluster.device.usable_bytes
        budget = budget_of_method(self.memory_budget, method, usable)
        options = {name: value for name, value in made.options.items() if name != "method"}
        return BudgetedStep(made.fun, made.args, cluster, budget, method, **options)


def _attempts_of_sizes(largest: Largest, maker: _Maker, limits: _Limits) -> SizeAttempts:
    """Return the attempts to fit sizes of a step on one cluster."""

    @cache
    def made(size: int) -> MadeStep:
        return made_step(maker.make_step, size)

    def step_of(size: int) -> BudgetedStep:
        return maker.step(made(size), maker.cluster)

    multiple = limits.multiple_of or _MULTIPLE_OF.get(largest) or _batch_multiple(maker, made)
    sizes = limits.sizes(largest, multiple)
    if len(sizes) > 1 and made(sizes[0]).shapes() == made(sizes[1]).shapes():
        raise OptionError(
            f"make_step({sizes[0]}) and make_step({sizes[1]}) return arguments of the same shapes;"
            f" expected them to depend on the {_MEANING[largest]}"
        )
    return SizeAttempts(largest, sizes, step_of)


def _batch_multiple(maker: _Maker, made: Callable[[int], MadeStep]) -> int:
    """Return the number of devices times the number of microbatches."""
    method = maker.method or maker.method_of(made(maker.cluster.num_devices))
    if method is None:
        return maker.cluster.num_devices
    devices = requested_mesh(method.devices, maker.cluster.num_devices).num_devices
    count = method.num_micro_batches
    return devices * (count if isinstance(count, int) else 1)


def _attempts_of_clusters(fewest: Fewest, maker: _Maker, limits: _Limits) -> SizeAttempts:
    """Return the attempts to fit a step on clusters of different sizes."""
    cluster = maker.cluster
    made = made_step(maker.make_step)
    method = maker.method_of(made)
    if method is not None and method.devices is not None:
        raise OptionError(
            f"fewest={fewest!r} chooses the devices, but method.devices is"
            f" {short_repr(method.devices)}; leave it out"
        )
    per_host = cluster.devices_per_host
    sizes: Sequence[int] = limits.sizes(fewest, 1)
    if fewest == "gpus":
        sizes = [size for size in sizes if size <= per_host or size % per_host == 0]
    if cluster.inter_host is None:  # there is only one host
        sizes = [size for size in sizes if size <= (1 if fewest == "hosts" else per_host)]
    if not sizes:
        raise OptionError(
            f"at_least={limits.at_least}, at_most={limits.at_most} and multiple_of="
            f"{limits.multiple_of} leave no number of {fewest} that {cluster.name!r} can have: part"
            f" of a host of {per_host} GPUs" + (", or whole hosts" if cluster.inter_host else "")
        )

    def step_of(size: int) -> BudgetedStep:
        hosts = size if fewest == "hosts" else ceil(size / per_host)
        local = per_host if fewest == "hosts" else min(size, per_host)
        return maker.step(made, cluster.with_size(hosts, local))

    rungs = [
        index
        for index, size in enumerate(sizes)
        if _divides_well(size // per_host if fewest == "gpus" and size > per_host else size)
    ]
    return SizeAttempts(fewest, sizes, step_of, rungs)


def _divides_well(number: int) -> bool:
    """Return whether a number is a power of two or three times one, as most batches divide by."""
    return number // (number & -number) in (1, 3)


def _result(attempts: SizeAttempts, index: int, beyond: int | None, *, is_confirmed: bool) -> Fit:
    """Return the answer.

    Args:
        attempts: what was tried.
        index: the index of the answer.
        beyond: the index of the next size, which does not fit, if there is one.
        is_confirmed: whether the answer was compiled.
    """
    step = attempts.step_of(attempts.sizes[index])
    compiled = attempts.compiled.get(index)
    if is_confirmed:
        assert isinstance(compiled, tuple)
        plan, prediction = compiled
    else:
        plan = attempts.plans[index]
        assert isinstance(plan, Plan)
        prediction = step.predict(plan, compiled=False)
    tried = sorted((attempts.sizes[i], isinstance(p, Plan)) for i, p in attempts.plans.items())
    return Fit(
        quantity=attempts.quantity,
        size=attempts.sizes[index],
        budget=step.budget,
        plan=plan,
        prediction=prediction,
        is_confirmed=is_confirmed,
        refused=None if beyond is None else attempts.refused(beyond),
        tried=tuple(tried),
    )
