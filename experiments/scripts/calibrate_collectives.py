"""Times collectives and fits their curves.

python -m experiments.scripts.calibrate_collectives SETTINGS TABLE ERRORS PROFILE
"""

import json
import sys
from pathlib import Path

import jax

from experiments.local_steps import use_devices_like
from experiments.measurements.collective_timing import measure_collectives
from experiments.sweep_progress import say
from simulator import Cluster
from simulator.calibration import fit_collective_profile, write_profile


def main(settings_json: str, table_path: str, errors_path: str, profile_path: str) -> None:
    """Time collectives on the devices of this machine, and fit the simulator's curves to them.

    Args:
        settings_json: the section `collectives` of the configuration, as JSON.
        table_path: where the measurements go.
        errors_path: where the errors of the fit go.
        profile_path: where the curves go.
    """
    settings = json.loads(settings_json)
    cluster, groups = Cluster.load(settings["cluster"]), settings["group_sizes"]
    use_devices_like(cluster, max(groups))
    num_bytes = [round(kib * 1024) for kib in settings["sizes_kib"]]
    table = measure_collectives(
        cluster.device.name, groups, num_bytes, settings["repeat"], settings["number"]
    )
    source = (
        "fitted by simulator.calibration.fit_collective_profile to collectives of jax"
        f" {jax.__version__} on {cluster.name}, those of"
        " experiments/rules/calibrate_collectives.smk;"
        " held_out_error is the mean over the fifth that was not fitted to"
    )
    profile, errors = fit_collective_profile(table, source)
    table.to_csv(table_path, index=False, float_format="%.6g")
    errors.to_csv(errors_path, index=False, float_format="%.4g")
    write_profile(Path(profile_path), profile)
    for kind, error in zip(errors["kind"], errors["held_out_error"], strict=True):
        say(f"collective {kind}: error {error:.1%} where it was not fitted")


if __name__ == "__main__":
    main(*sys.argv[1:])
