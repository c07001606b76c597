"""The folder of an unfinished build, and the tasks that workers run.

In `warmup`, only this folder imports joblib, Dask and Ray.
"""
