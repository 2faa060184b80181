"""One module per figure of the paper, with the figure's name.

Each has `rows(part, smoke)`, which computes the rows of one part; `draw(table)`, which returns the
matplotlib figure; and `caption(table)`. `experiments.paper.study` lists them.
"""
