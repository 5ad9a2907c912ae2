"""The gateway's page in a real browser: before a recorded gateway, and before a mesh."""
