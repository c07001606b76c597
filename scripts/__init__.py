"""What the project runs besides its tests: a demo, benchmarks (`scripts.bench`) and checks (`scripts.checks`)."""
