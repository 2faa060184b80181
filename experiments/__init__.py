"""The sweep of models, meshes and strategies planned, measured and simulated by Snakemake."""
