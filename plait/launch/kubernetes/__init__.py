"""Runs in Kubernetes pods: submission, following, queue admission, and the launcher inside pods."""
