"""The load generator behind ``lamella bench``: a client of any OpenAI-compatible server."""
