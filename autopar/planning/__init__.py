"""Planning: from a traced step to a plan."""
