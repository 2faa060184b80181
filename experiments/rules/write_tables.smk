# Collect all cells into tables, and compare predictions with published numbers.


rule write_tables:
    input:
        published=ROOT / sweep.published,
        cells=expand("results/cells/{job}", job=sweep.jobs),
    output:
        "results/tables/cells.csv",
        "results/tables/quickstart.csv",
        "results/measured/cells.csv",
        "results/measured/cells.parquet",
    params:
        code=code_hash(*CODE),
    log:
        "results/logs/tables.log",
    message:
        "tables"
    shell:
        "{PYTHON} experiments.scripts.write_tables"
        " results/tables results/measured {input.published:q} {input.cells} 2> {log}"
