"""The room that turns KV into tokens, one step at a time."""
