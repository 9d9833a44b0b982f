"""The NVIDIA device plugin.

Pure parts: ``inventory`` (cards to register and to offer), ``pending`` (which pod, which container),
``preferred`` (kubelet's choice of ids), ``answer`` (environment, mounts, limits). Thin shells:
``workspace`` (files), ``allocator`` (one Allocate after the other), ``registration``, ``health``,
``server`` (gRPC) and ``service`` (life cycle).
"""
