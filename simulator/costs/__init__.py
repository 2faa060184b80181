"""Cost models: seconds of kernels, collectives and transfers on a cluster."""
