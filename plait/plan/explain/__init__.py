"""Explanations of a plan: reasons for its strategy, its memory, and changes to the job that would
help."""
