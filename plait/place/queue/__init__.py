"""Queues: admission of jobs next to planned jobs, and replays of traces."""
