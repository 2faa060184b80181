# The sweep: models x meshes x strategies, planned, measured on this machine, and simulated for clusters.
# `uv run snakemake --cores all` computes everything; `--configfile mine.yaml` overrides the keys in mine.yaml.

import json
import sys
from pathlib import Path

sys.path.insert(0, workflow.basedir)  # the project may not be the working directory

from experiments.sources import CODE, code_hash
from experiments.sweep import make_sweep
from simulator import cluster_files


configfile: f"{workflow.basedir}/experiments/config/default.yaml"


sweep = make_sweep(config)  # raises before any job starts if a key or a name is wrong

PYTHON = f"PYTHONPATH={workflow.basedir} {sys.executable} -m"
ISOLATE = f"{PYTHON} experiments.isolate"  # a cell that fails gets a result that says so


wildcard_constraints:
    job=r"[^/]+/[^/]+/[^/]+", # platform/model-size/mesh


# Cells are inputs, too: git tracks tables and figures but not cells, and so a fresh clone computes them.
rule all:
    input:
        expand("results/cells/{cell}", cell=sweep.cells),
        "results/tables/cells.csv",
        "results/tables/collectives_fit.csv",
        expand("results/figures/{figure}.svg", figure=sweep.figures),


include: "experiments/rules/plan_cells.smk"
include: "experiments/rules/measure_cells.smk"
include: "experiments/rules/simulate_cells.smk"
include: "experiments/rules/calibrate_collectives.smk"
include: "experiments/rules/write_tables.smk"
include: "experiments/rules/draw_figures.smk"
