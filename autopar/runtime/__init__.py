"""Execution of jobs in this process; workers on other hosts use the same jobs and data loaders."""
