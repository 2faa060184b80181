"""Execution of jobs: in this process, and what this process shares with workers of other hosts."""
