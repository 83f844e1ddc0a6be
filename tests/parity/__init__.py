"""Programs that were written for Ray Serve, and what they print under it: none may notice which of both it runs on."""
