"""Inter-operator planning: stages, pipeline schedules and the partition of a step into tasks."""
