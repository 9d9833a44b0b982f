"""Generated stubs of the kubelet APIs (device plugin v1beta1, PodResources v1); see README.md here."""
