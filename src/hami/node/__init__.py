"""What runs on a GPU node: NVML, device plugin, monitor."""
