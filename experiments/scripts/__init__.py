"""One script per rule of the workflow, with the rule's name."""
