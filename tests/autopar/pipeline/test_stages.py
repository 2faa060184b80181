import json
from pathlib import Path

import numpy as np
import pytest

from autopar.pipeline.stage_search import construct_stages
from autopar.pipeline.stages import StageCost, StageProblem, step_seconds
from autopar.pipeline.submeshes import HostPool, Submesh, enumerate_submeshes

GOLDEN = Path(__file__).parents[2] / "golden"
INSTANCES = json.loads((GOLDEN / "stages.json").read_text())["instances"]
ARRAYS = np.load(GOLDEN / "stage_costs.npz")
ROOM = 100


@pytest.mark.parametrize("golden", INSTANCES, ids=lambda x: str(x["case"]))
def test_the_recorded_optimum_is_found(golden):
    seconds, later = ARRAYS[f"seconds{golden['case']}"], ARRAYS[f"later{golden['case']}"]
    pool = HostPool(golden["hosts"], golden["devices_per_host"], ROOM)
    meshes = tuple(Submesh(0, int(hosts), int(devices)) for hosts, devices in ARRAYS[f"submeshes{golden['case']}"])
    assert meshes == enumerate_submeshes([pool], "whole_hosts")

    def costs(start, stop, mesh):
        at = start, stop - 1, meshes.index(mesh)
        # one byte per microbatch in flight, `later` + 1 of which fit
        return [StageCost(t, 0.0, ROOM - (n + 1), 1.0) for t, n in zip(seconds[at], later[at], strict=True)]

    problem = StageProblem(golden["layers"], (pool,), meshes, golden["micro_batches"], costs)
    plan = construct_stages(problem)
    assert plan.seconds == pytest.approx(golden["objective"], rel=1e-6)
    assert step_seconds(problem, plan.stages) == pytest.approx(plan.seconds)
