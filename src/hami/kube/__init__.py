"""Thin asynchronous Kubernetes client: configuration, requests, informers, patches, bindings, events.

Layers, from the bottom: ``errors`` and ``ratelimit`` (no I/O), ``auth`` and ``config`` (who we are and
where the API server is), ``client`` (one request, one page, one watch), ``operations`` (the few verbs the
project needs), ``informer`` (list and watch without end), ``events`` (recorder) and ``logs`` (the one log
formatter).
"""
