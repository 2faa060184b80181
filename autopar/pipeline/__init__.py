"""Pipelines: stages, schedules, and the partition of a step into tasks.

`autopar.planning.stage_construction` searches the stages.
"""
