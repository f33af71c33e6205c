"""Megatron-LM: readers of command lines and logs, the writer of command lines, and flag rules."""
