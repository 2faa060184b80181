"""Runs training steps of public models, unchanged, by every method; tabulates what became of them.

    uv run --group reach python -m experiments.reach [--models PATTERN] [--methods PATTERN] [-j N]

`public_models` lists the models; a module per library defines them. `reach_methods` lists the
methods, `reach_cells` compares a cell with one device, and `reach_pool` runs cells in processes.
"""
