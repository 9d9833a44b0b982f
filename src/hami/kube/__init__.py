"""Thin asynchronous Kubernetes client.

Layers, from the bottom: ``errors``, ``ratelimit`` and ``resources`` (no I/O), ``auth`` and ``config`` (who
we are and where the API server is), ``client`` (one request, one watch), ``operations`` (paged lists,
bindings, metadata patches), ``informer`` (list and watch without end), ``events`` (recorder), ``lease``
(observing a Lease). Beside them ``certificates`` (an authority of our own) and ``logs`` (the log format of
every process).
"""
