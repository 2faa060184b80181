"""Tables and figures from the results of cells."""
