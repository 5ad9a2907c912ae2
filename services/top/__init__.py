"""The mesh in a terminal, as it changes: what the page draws, without a browser."""
