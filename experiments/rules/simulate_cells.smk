# Plan each strategy of a job, compile it for a cluster, and simulate it. Uses no device.


rule simulate_cells:
    input:
        lambda wildcards: sweep.cluster_files[sweep.jobs[f"simulated/{wildcards.job}"].cluster],
    output:
        directory("results/cells/simulated/{job}"),
    params:
        code=code_hash(*CODE),
        job=lambda wildcards: sweep.jobs[f"simulated/{wildcards.job}"].to_json(),
    resources:
        runtime=60,
        mem_mb=4000,
    priority: lambda wildcards: priorities[f"simulated/{wildcards.job}"]
    log:
        "results/logs/simulate/{job}.log",
    message:
        "simulate {wildcards.job}"
    shell:
        "{ISOLATE} {params.job:q} {output} {params.code} 2> {log}"
