"""One rank of a step: models, segment lists, pipelines, sharding, the optimizer."""
