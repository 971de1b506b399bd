"""Calls on global arrays."""
