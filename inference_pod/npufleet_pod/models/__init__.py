"""Model families: configuration, weights, decoder."""
