# Run each plan on the devices of this machine. It takes all cores, so that measurements are undisturbed.


rule measure_cells:
    input:
        plans="results/plans/{job}",
    output:
        cells=directory("results/cells/measured/{job}"),
    params:
        code=code_hash(*CODE),
        job=lambda wildcards: sweep[wildcards.job].to_json(),
        settings=json.dumps(sweep.measure),
    threads: workflow.cores
    log:
        "results/logs/measure/{job}.log",
    message:
        "measure {wildcards.job}"
    shell:
        "{ISOLATE} measure {params.job:q} {output.cells} {input.plans} {params.settings:q} 2> {log}"
