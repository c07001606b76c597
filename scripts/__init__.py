"""What the project runs beside its tests: a demo, benchmarks (`scripts.bench`) and checks (`scripts.checks`)."""
