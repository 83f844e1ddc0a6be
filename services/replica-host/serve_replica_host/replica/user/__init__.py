"""The user's code and what calls it."""
