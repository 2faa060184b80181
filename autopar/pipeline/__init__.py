"""Inter-operator planning: layers, stages, schedules and what moves between stages."""
