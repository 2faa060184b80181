"""Tables and figures of the results of cells."""
