"""Thin asynchronous Kubernetes client: informers, patch, bind, lease, events."""
