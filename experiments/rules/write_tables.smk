# Collect all cells into tables, and compare predictions with published numbers.


rule write_tables:
    input:
        published=Path(workflow.basedir) / sweep.published,
        cells=expand("results/cells/{cell}", cell=sweep.cells),
    output:
        "results/tables/cells.csv",
        "results/tables/cells.parquet",
        "results/tables/quickstart.csv",
    params:
        code=code_hash(*CODE),
    log:
        "results/logs/tables.log",
    message:
        "tables"
    shell:
        "{PYTHON} experiments.scripts.write_tables results/tables {input.published} {input.cells} 2> {log}"
