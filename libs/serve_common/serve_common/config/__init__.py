"""User configuration as frozen structs: every field with its meaning, unit, range and default."""
