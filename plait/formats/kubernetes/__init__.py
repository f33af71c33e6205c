"""Readers of Kubernetes nodes and pods, and the writer of manifests."""
