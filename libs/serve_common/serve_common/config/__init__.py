"""What users configure, as frozen values: every field with its meaning, unit, range and default."""
