# Time single collectives on the devices of this machine, and fit the simulator's curves to them.
# `snakemake calibrate_collectives` runs this alone.


rule calibrate_collectives:
    input:
        sweep.cluster_files[sweep.collectives["cluster"]],
    output:
        table="results/measured/collectives.csv",
        errors="results/measured/collectives_fit.csv",
        profile="results/measured/collectives_profile.yaml",
    params:
        code=code_hash(*CODE),
        settings=json.dumps(sweep.collectives),
    threads: workflow.cores
    log:
        "results/logs/collectives.log",
    message:
        "collectives"
    shell:
        "{PYTHON} experiments.scripts.calibrate_collectives {params.settings:q} {output} 2> {log}"
