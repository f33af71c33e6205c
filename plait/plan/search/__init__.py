"""Search of a space of strategies for the fastest ones that fit into memory."""
