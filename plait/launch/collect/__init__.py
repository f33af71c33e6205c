"""A host's agent while ranks train: it writes the ranks' rings to files, serves live metrics, and
feeds other tools' loggers."""
