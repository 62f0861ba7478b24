"""Plans whose stages have consecutive ranks."""
