"""Readers of job traces: one file a published schema, one for any other table; all of them make a
``Trace``."""
