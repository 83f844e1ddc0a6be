"""User configuration as frozen structs: every field with its meaning, unit and default.

Ranges are in the ``check_…`` functions, which the page ``docs/reference/configuration.md`` reads them from.
"""
