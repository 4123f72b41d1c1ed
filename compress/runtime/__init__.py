"""The runtime: what an exported folder needs in order to run, and nothing else."""
