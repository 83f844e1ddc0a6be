"""Generated attacks on all that takes bytes from outside: ``python -m tests.fuzz``, and a short way in the suite."""
