# The sweep: models x meshes x strategies, planned, measured on this machine, and simulated for
# clusters. `uv run snakemake --cores all` computes everything; `--configfile mine.yaml` overrides
# the keys in mine.yaml. `snakemake paper` computes the figures and the text of the paper instead.
# Options that every run has are in profiles/default/config.yaml.

import json
import sys
from pathlib import Path
from shlex import quote

ROOT = Path(workflow.basedir)  # the project may not be the working directory
sys.path.insert(0, str(ROOT))

from experiments.checked_sweep import checked_sweep
from experiments.sources import CODE, code_hash
from experiments.sweep_progress import job_priorities, recorded_seconds
from experiments.sweep_run import SweepRun


configfile: ROOT / "experiments/config/default.yaml"


# Raises before any job starts if a key or a name is wrong.
sweep = checked_sweep(config, Path(".snakemake/sweep.json"))
seconds = recorded_seconds(
    Path("results/measured/cells.csv"), ROOT / "results/recorded/cells.csv"
)
priorities = job_priorities(sweep, seconds)
run = SweepRun(workflow, sweep, seconds)

PYTHON = f"PYTHONPATH={quote(str(ROOT))} {quote(sys.executable)} -m"
ISOLATE = f"{PYTHON} experiments.isolate"  # a cell that fails gets a result that says so


wildcard_constraints:
    job=r"[^/]+/[^/]+/[^/]+", # platform/model-size/mesh


# Cells are inputs, too: git tracks tables and figures but no cells, so a fresh clone computes them.
rule all:
    input:
        expand("results/cells/{job}", job=sweep.jobs),
        "results/tables/cells.csv",
        "results/measured/collectives_fit.csv",
        "results/report/index.html",
        lambda _: list(figures),


include: "experiments/rules/simulate_cells.smk"
include: "experiments/rules/measure_cells.smk"
include: "experiments/rules/calibrate_collectives.smk"
include: "experiments/rules/write_tables.smk"
include: "experiments/rules/draw_figures.smk"
include: "experiments/rules/write_report.smk"
include: "experiments/rules/record.smk"
include: "experiments/rules/paper.smk"


onstart:
    run.start()


onsuccess:
    run.succeed()


onerror:
    run.fail()
