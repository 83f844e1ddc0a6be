"""The user's code, and the code that calls it."""
