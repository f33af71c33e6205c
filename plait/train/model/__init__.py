"""The mathematics between collectives, and where its parameters live."""
