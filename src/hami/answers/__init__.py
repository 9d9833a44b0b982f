"""Answers for people: why a pod waits, what is granted and used, what would fit.

Everything is computed from a `Snapshot` of the cluster's objects with the scheduler's own core (decision 42):
taken live or read from a file, the answers are the same. Nothing here writes to a cluster.
"""
