"""Rollouts: a new version takes over traffic step by step, and its requests decide whether it may."""
