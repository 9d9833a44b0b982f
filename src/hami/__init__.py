"""HAMi: share GPUs and other accelerators between Kubernetes pods, with enforced limits."""
