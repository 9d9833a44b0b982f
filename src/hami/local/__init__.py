"""The embedded cluster: API server, scheduler loop and kubelet device manager in one process."""
