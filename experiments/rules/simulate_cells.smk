# Compile each plan for a cluster, and simulate it. Uses no device.


rule simulate_cells:
    input:
        plans="results/plans/{job}",
    output:
        cells=directory("results/cells/simulated/{job}"),
        timelines=directory("results/timelines/{job}"),
    params:
        code=code_hash(*CODE),
        job=lambda wildcards: sweep[wildcards.job].to_json(),
    log:
        "results/logs/simulate/{job}.log",
    message:
        "simulate {wildcards.job}"
    shell:
        "{ISOLATE} simulate {params.job:q} {output.cells} {input.plans} {output.timelines} 2> {log}"
