"""Comparison of replayed requests: differences of two responses, and whether a version really differs. Pure."""
