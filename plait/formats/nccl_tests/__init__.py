"""Readers of the output of nccl-tests and rccl-tests."""
