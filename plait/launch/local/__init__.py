"""Local ranks, the agents that start them on other machines, and the supervisor that restarts
them."""
