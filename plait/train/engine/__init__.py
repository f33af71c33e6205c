"""One rank of a training step: models, instruction lists, pipelines, sharding, the optimizer."""
