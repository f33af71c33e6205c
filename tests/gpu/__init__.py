"""Tests that need a GPU. Its driver is asked whether there is one when they are read, and reads its
settings then."""

from plait.core.base.env import ready_for_accelerator

ready_for_accelerator(lazy=True)  # ranks of tests share the GPU: kernels loaded at the start are gigabytes for each
