"""Placing jobs on the nodes of a switched cluster, and letting them wait for it. No torch."""
