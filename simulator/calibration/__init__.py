"""Parameters of the cost models from measurements, with what was held out and the errors there."""
