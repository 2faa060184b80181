# Draw step time and memory of every strategy, in a figure for each model on each platform, as soon
# as its cells are there.


def figure_path(figure):
    """Return the file of a figure; those of measurements are of this machine."""
    source, name = figure.split("/", 1)
    folder = {"simulated": "figures/simulated", "measured": "measured/figures"}[source]
    return f"results/{folder}/{name}.svg"


figures = {figure_path(figure): jobs for figure, jobs in sweep.figures.items()}


rule draw_figures:
    input:
        published=ROOT / sweep.published,
        cells=lambda wildcards: expand(
            "results/cells/{job}", job=figures[f"results/{wildcards.figure}.svg"]
        ),
    output:
        "results/{figure}.svg",
    wildcard_constraints:
        figure=r"(figures/simulated|measured/figures)/[^/]+/[^/]+",
    params:
        code=code_hash(*CODE),
    priority: 1e9 # the first results to look at
    log:
        "results/logs/{figure}.log",
    message:
        "figure {wildcards.figure}"
    shell:
        "{PYTHON} experiments.scripts.draw_figures"
        " {output} {input.published:q} {input.cells} 2> {log}"
