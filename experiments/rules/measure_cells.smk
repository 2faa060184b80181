# Plan each strategy of a job, and run it on the devices of this machine. The job takes all cores,
# so that measurements are undisturbed.


rule measure_cells:
    input:
        lambda wildcards: sweep.cluster_files[sweep.jobs[f"measured/{wildcards.job}"].cluster],
    output:
        directory("results/cells/measured/{job}"),
    params:
        code=code_hash(*CODE),
        job=lambda wildcards: sweep.jobs[f"measured/{wildcards.job}"].to_json(),
        settings=json.dumps(sweep.measure),
    threads: workflow.cores
    resources:
        runtime=120,
        mem_mb=8000,
    priority: lambda wildcards: priorities[f"measured/{wildcards.job}"]
    log:
        "results/logs/measure/{job}.log",
    message:
        "measure {wildcards.job}"
    shell:
        "{ISOLATE} {params.job:q} {output} {params.code} {params.settings:q} 2> {log}"
