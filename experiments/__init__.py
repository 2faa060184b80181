"""The sweep: models x meshes x strategies, planned, measured and simulated by a Snakemake workflow."""
