"""The room that turns prompts into KV and a first token."""
