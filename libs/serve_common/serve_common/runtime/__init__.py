"""What a service process is made of: tasks, threads, settings, health, the operations port."""
