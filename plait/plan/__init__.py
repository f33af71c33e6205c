"""Planning: predicts a strategy's cost on a cluster, and chooses the best strategy. No torch."""
