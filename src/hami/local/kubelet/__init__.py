"""The kubelet stand-in: device manager, pod workers, containers as isolated processes."""
