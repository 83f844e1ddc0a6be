"""Generates the reference pages from the code: ``make docs``.

Why generated: a page that is maintained by hand lists removed fields and lacks new ones. Meanings are the strings under
the fields, ranges are read from the checks, commands from the parser; a test compares each page with the code.
"""
