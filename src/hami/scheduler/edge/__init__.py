"""The edge: HTTP listeners, webhook, bindings, informers, leadership and metrics around the core."""
