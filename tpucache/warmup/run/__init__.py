"""The folder of an unfinished build, and the tasks that workers run. Only this folder imports joblib, Dask and Ray."""
