"""A plan executed under its own or other conditions, what would help it, and where devices vary."""
