# The paper: `snakemake paper`. Each figure has a rule that computes its rows, with a job for each of
# its parts, and one that draws it. Rows of a part are kept, so that a stopped run goes on.
# `--configfile experiments/config/paper-smoke.yaml` computes every rule at tiny size.

from experiments.paper.figure_files import SUFFIXES, TEXT, TEXT_FILES, mark_changed, rows_code
from experiments.paper.published_values import check_published
from experiments.paper.study import FIGURES

SIZE = config["paper"]
FOLDER = {"full": "results/paper", "smoke": "results/paper-smoke"}[SIZE]
MARKERS = ".snakemake/paper"

check_published()  # raises before any job starts if a published number is missing
# A job on a cluster, or a second run, would see files while others write them.
if workflow.is_main_process and not run.another_runs():
    remove = not workflow.output_settings.dryrun
    for file in mark_changed(Path(FOLDER), Path(MARKERS) / SIZE, remove=remove):
        run.warn(f"{file} is not as it was written; `snakemake paper` writes it again.")

PARTS = {
    figure.name: [f"{FOLDER}/cells/{figure.name}/{part}.csv" for part in figure.parts_of(SIZE)]
    for figure in FIGURES
}
FIGURE_FILES = [
    f"{FOLDER}/{figure.name}{suffix}" for figure in FIGURES for suffix in (*SUFFIXES, ".json")
]


rule paper:
    input:
        PARTS.values(), # inputs, too, so that one that is removed is computed again
        FIGURE_FILES,
        [f"{FOLDER}/{file}" for file in TEXT_FILES],


for figure in FIGURES:

    rule:
        name:
            f"paper_rows_{figure.name}"
        input:
            [ROOT / file for file in figure.published],
        output:
            f"{FOLDER}/cells/{figure.name}/{{part}}.csv",
        params:
            figure=figure.name,
            code=rows_code(figure),
        resources:
            **figure.resources,
        priority: 10 * figure.minutes # the longest first
        log:
            f"results/logs/paper/{figure.name}/{{part}}.log",
        message:
            f"rows of {figure.name}"
        shell:
            "{PYTHON} experiments.paper.paper_cell"
            " {params.figure} {wildcards.part} {SIZE} {output} 2> {log}"

    rule:
        name:
            f"paper_figure_{figure.name}"
        input:
            marker=f"{MARKERS}/{SIZE}/{figure.name}",
            parts=PARTS[figure.name],
        output:
            [f"{FOLDER}/{figure.name}{suffix}" for suffix in (*SUFFIXES, ".json")],
        localrule: True # takes seconds, less than a queue
        params:
            figure=figure.name,
            rows_code=rows_code(figure),
            code=code_hash("experiments/paper"),
        log:
            f"results/logs/paper/{figure.name}.log",
        message:
            f"figure {figure.name}"
        shell:
            "{PYTHON} experiments.paper.draw_figure"
            " {params.figure} {FOLDER} {params.rows_code} {input.parts} 2> {log}"


rule paper_text:
    input:
        FIGURE_FILES,
        marker=f"{MARKERS}/{SIZE}/{TEXT}",
        text=ROOT / "experiments/paper/paper.typ",
    output:
        [f"{FOLDER}/{file}" for file in (*TEXT_FILES, f"{TEXT}.json")],
    localrule: True
    params:
        code=code_hash("experiments/paper"),
    log:
        "results/logs/paper/text.log",
    message:
        "paper"
    shell:
        "{PYTHON} experiments.paper.write_paper {FOLDER} {input.text:q} {params.code} 2> {log}"
