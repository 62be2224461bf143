"""What a run leaves behind and shows while it runs: the run directory, metrics, live progress, the report."""
