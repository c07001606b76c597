"""Running a plan: its tasks, which of them are left, and who runs them; only here are joblib, Dask and Ray imported."""
