"""Placement of jobs on the nodes of a switched cluster, and the queue of jobs that wait for it. No
torch."""
