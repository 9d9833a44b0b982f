"""What runs on a GPU node: the kubelet device plugin and the monitor, and what both need (NVML, safe
files).
"""
