"""The console in a real browser: Debian's chromium, driven by playwright, against real stacks."""
