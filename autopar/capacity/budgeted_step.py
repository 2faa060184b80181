"""A step to plan and compile within a memory budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.capacity.automatic_method import automatic_method, mesh_of_hosts
from autopar.devices import logical_mesh, mesh_on_cluster
from autopar.methods import PlanningMethod
from autopar.plan import Plan
from autopar.planning.method_planning import Target, plan_by_method
from autopar.planning.plan_step import packed_step
from autopar.planning.stage_problem import NoStagesError
from autopar.prediction.predicting import predict
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.arguments import Argnums, BatchArgnums
from simulator.engine.prediction import Prediction
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster

DoesNotFit = (MemoryBudgetError, NoStagesError)
"""The errors of a step that no plan fits into memory."""

SLACK = 1.05
"""Factor by which a plan may exceed the budget before it is not compiled.

The planner's memory is this close to XLA's for nearly all plans; see
results/tables/memory_budgets.csv.
"""


class ProgramTooLargeError(MemoryBudgetError):
    """The plans within the budget need more than it when XLA compiles them."""


_UNLIMITED = 1e18
"""More bytes than any device has."""

_ROUNDS = 3
"""Maximum number of plans that are compiled for one step."""


@dataclass(frozen=True)
class BudgetedStep:
    """A step, the hardware, and the bytes of one device that its compiled program may use.

    Attributes:
        fun: the step.
        args: its arguments, arrays or ShapeDtypeStructs.
        cluster: the hardware.
        budget: bytes of one device.
        method: the planning method; None for the automatic one.
        batch_argnums: as in `parallelize`.
        donate_argnums: as in `parallelize`.
        tokens: number of tokens in the batch, for predictions.
    """

    fun: Callable[..., Any]
    args: Sequence[Any]
    cluster: Cluster
    budget: float
    method: PlanningMethod | None = None
    batch_argnums: BatchArgnums = "auto"
    donate_argnums: Argnums = "auto"
    tokens: int = 0

    @property
    def planning_method(self) -> PlanningMethod:
        """The method, or what the automatic one stands for."""
        return self.method or automatic_method(self.cluster)

    def plan(self, budget: float | None = None) -> Plan:
        """Return the fastest plan whose predicted bytes are within a budget.

        The planner's estimate is compared with the budget without a margin.

        Args:
            budget: bytes of one device; by default `self.budget`.

        Raises:
            MemoryBudgetError, NoStagesError: no plan fits.
        """
        budget = self.budget if budget is None else budget
        method = replace(self.planning_method, memory_budget=max(1.0, budget), cluster=None)
        fun, args, batch = packed_step(self.fun, self.args, self.batch_argnums)
        shape = mesh_of_hosts(method, self.cluster)
        mesh = (
            mesh_on_cluster(self.cluster, method.devices) if shape is None else logical_mesh(shape)
        )
        target = Target(mesh, self.cluster)
        return plan_by_method(method, fun, args, batch, target, suggests=False).plan

    def free_plan(self) -> Plan:
        """Return the fastest plan without a limit of memory."""
        return self.plan(_UNLIMITED)

    def predict(self, plan: Plan, *, compiled: bool) -> Prediction:
        """Return the prediction of a plan.

        Args:
            plan: the plan.
            compiled: whether XLA compiles it, instead of the planner's model of its program.
        """
        return predict(
            self.fun,
            self.args,
            plan,
            self.cluster,
            fidelity="compiled" if compiled else "analytic",
            batch_argnums=self.batch_argnums,
            donate_argnums=self.donate_argnums,
            tokens=self.tokens,
        )

    def compiled_within(self, excess: float = 1.0) -> tuple[Plan, Prediction]:
        """Return the fastest plan that XLA compiles within the budget, and its prediction.

        Plans that the planner predicts to exceed the budget by up to `SLACK` are compiled, too. One
        whose program exceeds the budget is planned again within less memory.

        Args:
            excess: bytes of the compiled program of a similar step, divided by those of its plan.
                If they are less, plans may exceed the budget by as much more.

        Raises:
            ProgramTooLargeError: all plans that were compiled need more.
            MemoryBudgetError, NoStagesError: there is no plan.
        """
        try:
            plan = self.plan()
        except DoesNotFit:
            plan = self.plan(SLACK * self.budget / min(1.0, excess))
        least = float("inf")
        for _ in range(_ROUNDS):
            prediction = self.predict(plan, compiled=True)
            used = prediction.memory.total
            if used <= self.budget:
                return plan, prediction
            least = min(least, used)
            try:
                plan = self.plan(plan.predicted_bytes - (used - self.budget))
            except DoesNotFit:
                break
        raise ProgramTooLargeError(self.budget, least, plan.step)

    def least_plan(self) -> Plan:
        """Return a plan that needs nearly the least memory: no other is known to need less.

        The least bytes are found by bisection, to within a few percent.
        """
        plan = self.free_plan()
        low, guess = 0.0, 0.5 * plan.predicted_bytes
        for _ in range(_BISECTIONS):
            high = plan.predicted_bytes
            if guess >= _CLOSE * high:
                break
            try:
                plan = self.plan(guess)
                guess = (low + plan.predicted_bytes) / 2
            except MemoryBudgetError as error:
                low = max(guess, min(error.least, high))
                near = _NEAR * error.least
                guess = near if low < near < _CLOSE * high else (low + high) / 2
            except NoStagesError:
                low, guess = guess, (guess + high) / 2
        return plan


_BISECTIONS = 6
"""Maximum number of budgets for which a step is planned to find the least."""

_CLOSE = 0.97
"""Share of the least bytes known above which no smaller budget is tried."""

_NEAR = 1.01
"""Factor of a lower bound of the bytes at which a plan often exists."""


def checked_cluster(cluster: AnyCluster, what: str) -> Cluster:
    """Return the cluster if its hosts are alike.

    Raises:
        ClusterError: it has several pools.
    """
    if isinstance(cluster, HeterogeneousCluster):
        raise ClusterError(
            f"{what} takes a cluster of hosts that are alike, but {cluster.name!r} has"
            f" {len(cluster.pools)} pools; give one of them, such as load_cluster(...).pools[0]"
        )
    return cluster
