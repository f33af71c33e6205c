"""Planning: what a strategy costs on a network, and which one to take. No torch."""
