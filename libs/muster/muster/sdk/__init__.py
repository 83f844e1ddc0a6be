"""Applications written in Python: declared with decorators, bound to arguments, built, and run on a stack."""
