"""Training recommenders with the embedding engine: the pipelined step, data, and an example."""
