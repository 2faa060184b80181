# Write results/report: a page with all tables and figures, and a page for each cell.


rule write_report:
    input:
        rules.write_tables.output,
        rules.calibrate_collectives.output,
        list(figures),
        cells=expand("results/cells/{job}", job=sweep.jobs),
        pages=sorted(ROOT.glob("autopar/report/page_files/*")),
    output:
        "results/report/index.html",
    params:
        code=code_hash(*CODE),
    log:
        "results/logs/report.log",
    message:
        "report"
    shell:
        "{PYTHON} experiments.scripts.write_report results {input.cells} 2> {log}"
