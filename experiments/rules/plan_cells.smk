# Plan how each strategy shards a model on a mesh of a cluster. Uses no device.


rule plan_cells:
    input:
        lambda wildcards: cluster_files(sweep[wildcards.job].cluster),
    output:
        directory("results/plans/{job}"),
    params:
        code=code_hash(*CODE),
        job=lambda wildcards: sweep[wildcards.job].to_json(),
    log:
        "results/logs/plan/{job}.log",
    message:
        "plan {wildcards.job}"
    shell:
        "{ISOLATE} plan {params.job:q} {output} 2> {log}"
