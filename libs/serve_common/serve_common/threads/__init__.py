"""Event loops in threads of their own, and what one thread hands to the loop of another.

Why: user code may block its thread, and what speaks to the bus must not stop with it.
"""
