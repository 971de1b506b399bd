"""Recommender training in JAX."""
