"""The folder of an unfinished build, its tasks, and who runs them. Only here are joblib and clusters imported."""
