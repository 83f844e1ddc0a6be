"""Messages between processes, and the subjects that they travel on."""
