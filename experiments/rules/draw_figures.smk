# Draw step time and memory of every strategy, in a figure for each model on each platform.


rule draw_figures:
    input:
        table="results/tables/cells.parquet",
    output:
        expand("results/figures/{figure}.svg", figure=sweep.figures),
    params:
        code=code_hash(*CODE),
    log:
        "results/logs/figures.log",
    message:
        "figures"
    shell:
        "{PYTHON} experiments.scripts.draw_figures {input.table} {output} 2> {log}"
