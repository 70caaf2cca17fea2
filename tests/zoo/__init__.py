"""Small models with random weights, one of each architecture that users compile."""
