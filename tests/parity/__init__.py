"""Programs that were written for Ray Serve, and what they print under it: a program may not notice which of both it runs on."""
