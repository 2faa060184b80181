"""From a traced step to a plan."""
