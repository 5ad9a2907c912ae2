"""How long a pass takes, by rooflines, by what others measured, and by our own profiles."""
