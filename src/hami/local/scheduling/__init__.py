"""The kube-scheduler stand-in: queue, fit of ordinary resources, calls to the extender."""
