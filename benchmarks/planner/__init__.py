"""The simulator against the real engine on this machine, and how many configurations a second a fleet's plan ranks."""
