# The sweep: models x meshes x strategies, planned, measured here, simulated for clusters that are not here.
# `uv run snakemake --cores all` makes everything; `--configfile mine.yaml` changes what mine.yaml names.

import json
import sys
from pathlib import Path

sys.path.insert(0, workflow.basedir)  # the project itself, wherever the results go

from experiments.sources import CODE, code_hash
from experiments.sweep import make_sweep
from simulator import cluster_files


configfile: f"{workflow.basedir}/experiments/config/default.yaml"


sweep = make_sweep(config)  # every key and name is right, or nothing starts

PYTHON = f"PYTHONPATH={workflow.basedir} {sys.executable} -m"
ISOLATE = f"{PYTHON} experiments.isolate"  # one cell's failure is that cell's result


wildcard_constraints:
    job=r"[^/]+/[^/]+/[^/]+", # platform/model-size/mesh


# Cells are asked for by name: they are not tracked, so a fresh clone computes them although it holds tables and figures.
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
