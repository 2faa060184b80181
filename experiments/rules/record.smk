# Replace the tracked measurements by those of this machine: `snakemake record`. A run of the whole
# sweep does not, and so it changes a tracked file only where a simulated number changed.

RECORDED = ["cells.csv", "collectives.csv", "collectives_fit.csv", "collectives_profile.yaml"]
RECORDED += [
    figure_path(figure).removeprefix("results/measured/")
    for figure in sweep.figures
    if figure.startswith("measured/")
]


rule record:
    input:
        [f"results/measured/{name}" for name in RECORDED],
    output:
        [f"results/recorded/{name}" for name in RECORDED],
    message:
        "record"
    params:
        names=RECORDED,
    shell:
        "cd results/measured && cp --parents {params.names} ../recorded"
